from __future__ import annotations

import math

import torch

_LAST = 2**31 - 1
_ONE = 2.0**40


def _ascending(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int32 in the same order, -0 = +0."""
    bits = (values + 0.0).view(torch.int32)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_(_LAST))


def _top(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """[N, M] float32 with its distinct int64 ids < 2**31 -> ids [N, k] of the largest, in order."""
    keys = (_ascending(values).to(torch.int64) << 32) + (_LAST - ids)
    return _LAST - (keys.topk(k, -1).values & 0xFFFFFFFF)


def ordered_top_k(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row by (value descending, id ascending).

    values: [N, V] float32, 1 <= k <= V -> values [N, k], ids [N, k] int64.
    """
    num_rows, width = values.shape
    # Tiles of about sqrt(V / k) make as many tile maxima as candidates, and so the least work.
    tile = 1 << max(4, min(8, round(math.log2(math.sqrt(width / k)))))
    if 2 * k * tile <= width:
        # The k tiles with the largest maxima, ties by index, hold the k largest values: every tile
        # before a tile's own has an element that comes before all of the tile's.
        num_tiles = -(-width // tile)
        padded = torch.nn.functional.pad(
            values, (0, num_tiles * tile - width), value=-torch.inf
        ).view(num_rows, num_tiles, tile)
        index = torch.arange(num_tiles, device=values.device)
        tiles = _top(padded.amax(-1), index, k)
        # A NaN with its sign set sorts behind the padding: hence the bounds.
        tiles.clamp_(max=num_tiles - 1)
        candidates = padded.gather(1, tiles[:, :, None].expand(-1, -1, tile)).flatten(1)
        columns = torch.arange(tile, device=values.device)
        ids = _top(candidates, (tiles[:, :, None] * tile + columns).flatten(1), k)
        ids.clamp_(max=width - 1)
    else:
        keys = _ascending(values).bitwise_not_()
        # One row at a time: torch sorts integers by radix only in one dimension.
        ids = torch.stack([row.sort(stable=True).indices[:k] for row in keys])
    return values.gather(1, ids), ids


def top_k_top_p(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    out_values: torch.Tensor,
    out_ids: torch.Tensor,
) -> None:
    num_candidates = out_values.shape[1]
    values, ids = ordered_top_k(logits, num_candidates)
    out_ids.copy_(ids)
    rank = torch.arange(num_candidates, dtype=torch.int32, device=logits.device)
    in_top_k = rank < top_k.clamp(min=1)[:, None]
    weights = (values - values[:, :1]).exp_().mul_(_ONE).to(torch.int64).mul_(in_top_k)
    mass = weights.cumsum(-1)
    before = mass - weights
    bound = mass[:, -1:].double() * top_p.double()[:, None]
    in_top_p = (before < bound) | (top_p >= 1)[:, None] | (rank == 0)
    keeps = (in_top_k & in_top_p).to(values.dtype)
    # 1 / keeps - 1 is 0 or inf; see ops/min_p.
    torch.sub(values, keeps.reciprocal_().sub_(1.0), out=out_values)
