"""An expert's tokens in tiles of INVARIANT_TILE rows: every product has one shape, so a token's
result does not depend on its batch. Each token's experts are added in the order of their indices.

Nothing waits for the device: how many tiles a step has is known there alone, and the host goes
through as many as there can be. On the CPU it looks.
"""

from __future__ import annotations

import torch

from pelton.ops.moe import MoESignature
from pelton.ops.moe.reference import activate, route
from pelton.ops.product import INVARIANT_TILE, tiled_product
from pelton.ops.registry import Kernel


def moe(
    signature: MoESignature,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> Kernel:
    accumulate = torch.promote_types(signature.dtype, torch.float32)
    looks = signature.device_type == "cpu"
    router_t = router.to(accumulate).t()

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return
        logits = x.new_empty((num_tokens, signature.num_experts), dtype=accumulate)
        tiled_product(x.to(accumulate), router_t, logits)
        if router_bias is not None:
            logits += router_bias
        weights, experts = route(signature, logits)
        tile_experts, tokens, weights = _tiles(signature, weights, experts)
        # One row more than there are tokens: what fills a tile up reads and writes there.
        padded = torch.cat([x, x.new_zeros((1, x.shape[1]))])
        total = torch.zeros_like(padded, dtype=accumulate)
        known = tile_experts.tolist() if looks else [None] * len(tile_experts)
        for tile, expert in enumerate(known):
            if expert == signature.num_experts:
                break  # no more tiles
            at = _At(expert, tile_experts[tile : tile + 1])
            inner = torch.mm(padded[tokens[tile]], at.of(gate_up).t())
            if gate_up_bias is not None:
                inner += at.of(gate_up_bias)
            result = torch.mm(activate(signature, inner), at.of(down).t())
            if down_bias is not None:
                result += at.of(down_bias)
            total.index_add_(0, tokens[tile], result * weights[tile, :, None])
        out.copy_(total[:num_tokens])

    return kernel


class _At:
    """One expert, by its index on the host or, when that is not known, on the device."""

    def __init__(self, known: int | None, index: torch.Tensor) -> None:
        self._known = known
        self._index = index

    def of(self, weights: torch.Tensor) -> torch.Tensor:
        if self._known is not None:
            return weights[self._known]
        # A tile past the last one has weight 0 and adds nothing, whichever expert it takes.
        return weights.index_select(0, self._index.clamp(max=weights.shape[0] - 1))[0]


def _tiles(
    signature: MoESignature, weights: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where each tile's rows come from.

    weights, experts: [T, top_k], T > 0. Returns, for n tiles: their experts [n], never decreasing,
    num_experts past the last tile; tokens [n, INVARIANT_TILE], T where a tile is filled up; weights
    alike, 0 there.
    """
    num_tokens, num_experts, size = len(experts), signature.num_experts, INVARIANT_TILE
    num_pairs = experts.numel()
    device = experts.device
    # Each expert that has tokens may leave a tile unfilled.
    num_tiles = (num_pairs + (size - 1) * min(num_experts, num_pairs)) // size
    sorted_experts, order = experts.flatten().sort(stable=True)
    bounds = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=device))
    starts, ends = bounds[:-1], bounds[1:]
    tiles = (ends - starts + size - 1) // size
    tile_ends = tiles.cumsum(0)
    tile = torch.arange(num_tiles, device=device)
    tile_experts = torch.searchsorted(tile_ends, tile, right=True)
    safe = tile_experts.clamp(max=num_experts - 1)
    first = starts[safe] + (tile - (tile_ends - tiles)[safe]) * size
    pair = first[:, None] + torch.arange(size, device=device)
    is_real = (pair < ends[safe][:, None]) & (tile_experts < num_experts)[:, None]
    source = order[pair.clamp(max=num_pairs - 1)]
    tokens = torch.where(is_real, source // signature.top_k, num_tokens)
    return tile_experts, tokens, torch.where(is_real, weights.flatten()[source], 0)
