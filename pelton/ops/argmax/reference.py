from __future__ import annotations

import torch

TILE = 512


def row_argmax(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values: [N, V] -> max [N] of the same dtype, id [N] int64."""
    width = values.shape[1]
    num_tiles = width // TILE
    if num_tiles < 2:
        ids = values.argmax(-1)
        return values.gather(1, ids[:, None])[:, 0], ids
    # A maximum without an index is vectorised, one with an index is not: find the first tile that
    # holds the maximum, then look for the index in that tile alone.
    body = torch.unflatten(values[:, : num_tiles * TILE], 1, (num_tiles, TILE))
    tile = body.amax(-1).argmax(-1)
    best_tile = body.gather(1, tile[:, None, None].expand(-1, 1, TILE))[:, 0]
    column = best_tile.argmax(-1)
    best = best_tile.gather(1, column[:, None])[:, 0]
    ids = tile * TILE + column
    if num_tiles * TILE == width:
        return best, ids
    tail = values[:, num_tiles * TILE :]
    tail_column = tail.argmax(-1)
    tail_best = tail.gather(1, tail_column[:, None])[:, 0]
    is_in_tail = (tail_best > best) | (tail_best.isnan() & ~best.isnan())
    return (
        torch.where(is_in_tail, tail_best, best),
        torch.where(is_in_tail, tail_column + num_tiles * TILE, ids),
    )


def argmax(logits: torch.Tensor, out_ids: torch.Tensor, out_max: torch.Tensor) -> None:
    best, ids = row_argmax(logits)
    out_ids.copy_(ids)
    out_max.copy_(best)
