"""The moe op by Triton kernels; see triton_kernels.py for how."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from pelton.ops.moe import FEW_TOKENS, MoESignature
from pelton.ops.moe.triton_kernels import add_picked, choose, down_few, gate_up_few, router_logits
from pelton.ops.moe.triton_sorted_kernels import (
    add_slots,
    choose_slots,
    count_pairs,
    down_sorted,
    gate_up_sorted,
    place_pairs,
)
from pelton.ops.registry import Kernel
from pelton.ops.triton_launch import Launch, compile_only, run

_ROUTER_SPLITS = 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """Measured on an H200 at Qwen3-30B-A3B's shape; see docs/performance.md."""

    gate_up: tuple[int, int, int, int] = (16, 256, 4, 2)  # BLOCK_I, BLOCK_K, STAGES, warps
    down: tuple[int, int, int, int] = (64, 128, 4, 4)  # BLOCK_H, BLOCK_K, STAGES, warps


class Memory:
    """What the kernels of one layer leave for each other; layers of one shape share it, since one
    runs after the other."""

    def __init__(self, signature: MoESignature, device: torch.device) -> None:
        num_experts = signature.num_experts
        most = min(FEW_TOKENS * signature.top_k, num_experts)
        of_experts = (FEW_TOKENS, num_experts)
        of_splits = (_ROUTER_SPLITS, *of_experts)
        self.logits = torch.empty(of_splits, dtype=torch.float32, device=device)
        self.weights = torch.empty(of_experts, dtype=torch.float32, device=device)
        self.picked = torch.empty(num_experts, dtype=torch.int32, device=device)
        self.num_picked = torch.empty(1, dtype=torch.int32, device=device)
        inner = (most, FEW_TOKENS, signature.intermediate_size)
        self.inner = torch.empty(inner, dtype=signature.dtype, device=device)
        results = (most, FEW_TOKENS, signature.hidden_size)
        self.results = torch.empty(results, dtype=torch.float32, device=device)
        self.is_compiled = False


_memory = functools.cache(Memory)


def few(
    signature: MoESignature,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Kernel:
    """For up to FEW_TOKENS tokens."""
    tiles = tiles or Tiles()
    memory = _memory(signature, router.device)
    num_experts, top_k = signature.num_experts, signature.top_k
    sizes = {"H": signature.hidden_size, "INNER": signature.intermediate_size, "E": num_experts}
    is_float32 = signature.dtype == torch.float32

    def shape(side: str, tile: tuple[int, int, int, int]) -> dict[str, int]:
        block, block_k, stages, warps = tile
        # Without the matrix units a tile is held in registers.
        block_k = 32 if is_float32 else block_k
        return {side: block, "BLOCK_K": block_k, "STAGES": stages, "num_warps": warps}

    gate_up_shape, down_shape = shape("BLOCK_I", tiles.gate_up), shape("BLOCK_H", tiles.down)
    router_shape = shape("BLOCK_E", (16, 256, 4, 4))
    splits = _ROUTER_SPLITS

    depends = _depends(router)

    def steps(launch: Launch, x: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens = x.shape[0]
        launch(
            router_logits,
            (triton.cdiv(num_experts, router_shape["BLOCK_E"]), 1, splits),
            x,
            router,
            router_bias,
            memory.logits,
            num_tokens,
            x.stride(0),
            H=signature.hidden_size,
            E=num_experts,
            HAS_BIAS=router_bias is not None,
            SPLITS=splits,
            BLOCK_T=FEW_TOKENS,
            **router_shape,
            **depends,
        )
        block_t = triton.next_power_of_2(num_tokens)
        launch(
            choose,
            (1,),
            memory.logits,
            memory.weights,
            memory.picked,
            memory.num_picked,
            num_tokens,
            E=num_experts,
            TOP_K=top_k,
            NORMALISE=signature.normalise_chosen,
            SPLITS=splits,
            BLOCK_T=block_t,
            BLOCK_E=triton.next_power_of_2(num_experts),
            num_warps=1 if block_t == 1 else 4,
            **depends,
        )
        most = min(num_tokens * top_k, num_experts)
        tiles_of_inner = triton.cdiv(signature.intermediate_size, gate_up_shape["BLOCK_I"])
        launch(
            gate_up_few,
            (most, tiles_of_inner),
            x,
            gate_up,
            gate_up_bias,
            memory.weights,
            memory.picked,
            memory.num_picked,
            memory.inner,
            num_tokens,
            x.stride(0),
            **sizes,
            HAS_BIAS=gate_up_bias is not None,
            LIMIT=signature.swiglu_limit or 0.0,
            ALPHA=signature.swiglu_alpha,
            BLOCK_T=FEW_TOKENS,
            **gate_up_shape,
            **depends,
        )
        launch(
            down_few,
            (most, triton.cdiv(signature.hidden_size, down_shape["BLOCK_H"])),
            memory.inner,
            down,
            memory.picked,
            memory.num_picked,
            memory.results,
            H=signature.hidden_size,
            INNER=signature.intermediate_size,
            BLOCK_T=FEW_TOKENS,
            **down_shape,
            **depends,
        )
        launch(
            add_picked,
            (num_tokens, triton.cdiv(signature.hidden_size, 128)),
            memory.results,
            down_bias,
            memory.weights,
            memory.picked,
            memory.num_picked,
            out,
            out.stride(0),
            H=signature.hidden_size,
            E=num_experts,
            HAS_BIAS=down_bias is not None,
            BLOCK_T=FEW_TOKENS,
            BLOCK_P=8,
            BLOCK_H=128,
            num_warps=4,
            **depends,
        )

    if router.is_cuda and not memory.is_compiled:
        memory.is_compiled = True
        block_t = 1
        while block_t <= FEW_TOKENS:
            x = router.new_empty(block_t, signature.hidden_size)
            steps(compile_only, x, x)
            block_t *= 2
    return functools.partial(steps, run)


def _depends(router: torch.Tensor) -> dict[str, bool]:
    """A launch begins while the one before it ends; Triton's interpreter does not know of it."""
    return {"DEPENDS": True, "launch_pdl": True} if router.is_cuda else {"DEPENDS": False}


@dataclass(frozen=True, slots=True)
class SortedTiles:
    """tile: pairs; then BLOCK_N, BLOCK_K, STAGES, warps of each product."""

    tile: int
    gate_up: tuple[int, int, int, int]
    down: tuple[int, int, int, int]


# By how many pairs an expert gets on average; measured on an H200, see docs/performance.md.
SORTED_TILES = (
    (8, SortedTiles(16, (64, 128, 3, 4), (64, 128, 4, 4))),
    (24, SortedTiles(32, (64, 128, 3, 4), (128, 64, 4, 4))),
    (80, SortedTiles(64, (128, 64, 3, 8), (128, 64, 4, 8))),
    (None, SortedTiles(128, (128, 64, 4, 8), (256, 64, 3, 8))),
)
_FLOAT32_TILES = SortedTiles(16, (32, 32, 3, 4), (64, 32, 3, 4))


class SortedMemory:
    """As Memory, for steps of up to max_tokens tokens; grows when a step has more. What a recorded
    step knows stays where it is."""

    def __init__(self, signature: MoESignature, device: torch.device) -> None:
        self._signature = signature
        self._device = device
        self._outgrown: list[object] = []
        self.max_tokens = 0
        self.is_compiled = False

    def reserve(self, num_tokens: int) -> None:
        if num_tokens <= self.max_tokens:
            return
        self._outgrown.append(dict(vars(self)))
        s, device = self._signature, self._device
        self.max_tokens = num_tokens = triton.next_power_of_2(num_tokens)
        num_pairs = num_tokens * s.top_k
        most_tiles = num_pairs // 16 + s.num_experts
        most_rows = num_pairs + 128 * s.num_experts
        self.logits = torch.empty(num_tokens, s.num_experts, dtype=torch.float32, device=device)
        self.weights = torch.empty(num_pairs, dtype=torch.float32, device=device)
        self.experts = torch.empty(num_pairs, dtype=torch.int32, device=device)
        self.counts = torch.empty(s.num_experts, dtype=torch.int32, device=device)
        self.pairs = torch.empty(most_rows, dtype=torch.int32, device=device)
        self.tile_experts = torch.empty(most_tiles, dtype=torch.int32, device=device)
        self.num_tiles = torch.empty(1, dtype=torch.int32, device=device)
        self.inner = torch.empty(most_rows, s.intermediate_size, dtype=s.dtype, device=device)
        self.results = torch.empty(num_pairs, s.hidden_size, dtype=s.dtype, device=device)


_sorted_memory = functools.cache(SortedMemory)


def sorted_tiles(signature: MoESignature, num_tokens: int) -> SortedTiles:
    if signature.dtype == torch.float32:
        # Without the matrix units a tile is held in registers.
        return _FLOAT32_TILES
    average = num_tokens * signature.top_k / signature.num_experts
    return next(tiles for limit, tiles in SORTED_TILES if limit is None or average <= limit)


def many(
    signature: MoESignature,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    tiles: SortedTiles | None = None,
) -> Kernel:
    """For any number of tokens."""
    memory = _sorted_memory(signature, router.device)
    num_experts, top_k = signature.num_experts, signature.top_k
    block_e = triton.next_power_of_2(num_experts)
    is_float32 = signature.dtype == torch.float32
    router_tile = (32, 32, 32, 3, 4) if is_float32 else (64, 64, 64, 4, 4)
    sizes = {"H": signature.hidden_size, "INNER": signature.intermediate_size}
    depends = _depends(router)

    def steps(launch: Launch, x: torch.Tensor, out: torch.Tensor) -> None:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return
        memory.reserve(num_tokens)
        num_pairs = num_tokens * top_k
        shape = tiles or sorted_tiles(signature, num_tokens)
        tokens, experts, block_k, stages, warps = router_tile
        launch(
            router_logits,
            (triton.cdiv(num_experts, experts), triton.cdiv(num_tokens, tokens)),
            x,
            router,
            router_bias,
            memory.logits,
            num_tokens,
            x.stride(0),
            H=signature.hidden_size,
            E=num_experts,
            HAS_BIAS=router_bias is not None,
            SPLITS=1,
            BLOCK_T=tokens,
            BLOCK_E=experts,
            BLOCK_K=block_k,
            STAGES=stages,
            num_warps=warps,
            **depends,
        )
        launch(
            choose_slots,
            (triton.cdiv(num_tokens, 8),),
            memory.logits,
            memory.weights,
            memory.experts,
            num_tokens,
            E=num_experts,
            TOP_K=top_k,
            NORMALISE=signature.normalise_chosen,
            BLOCK_T=8,
            BLOCK_E=block_e,
            num_warps=4,
            **depends,
        )
        launch(
            count_pairs,
            (num_experts,),
            memory.experts,
            memory.counts,
            num_pairs,
            BLOCK=2048,
            **depends,
        )
        launch(
            place_pairs,
            (num_experts,),
            memory.experts,
            memory.counts,
            memory.pairs,
            memory.tile_experts,
            memory.num_tiles,
            num_pairs,
            E=num_experts,
            BLOCK_E=block_e,
            TILE=shape.tile,
            BLOCK=2048,
            **depends,
        )
        # Each expert that has pairs may leave a tile unfilled.
        most_tiles = num_pairs // shape.tile + min(num_experts, num_pairs)
        block_n, block_k, stages, warps = shape.gate_up
        launch(
            gate_up_sorted,
            (most_tiles * triton.cdiv(signature.intermediate_size, block_n),),
            x,
            gate_up,
            gate_up_bias,
            memory.pairs,
            memory.tile_experts,
            memory.num_tiles,
            memory.inner,
            num_pairs,
            x.stride(0),
            **sizes,
            TOP_K=top_k,
            HAS_BIAS=gate_up_bias is not None,
            LIMIT=signature.swiglu_limit or 0.0,
            ALPHA=signature.swiglu_alpha,
            TILE=shape.tile,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            STAGES=stages,
            num_warps=warps,
            **depends,
        )
        block_n, block_k, stages, warps = shape.down
        launch(
            down_sorted,
            (most_tiles * triton.cdiv(signature.hidden_size, block_n),),
            memory.inner,
            down,
            down_bias,
            memory.weights,
            memory.pairs,
            memory.tile_experts,
            memory.num_tiles,
            memory.results,
            num_pairs,
            **sizes,
            HAS_BIAS=down_bias is not None,
            TILE=shape.tile,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            STAGES=stages,
            num_warps=warps,
            **depends,
        )
        launch(
            add_slots,
            (num_tokens, triton.cdiv(signature.hidden_size, 1024)),
            memory.results,
            out,
            out.stride(0),
            H=signature.hidden_size,
            TOP_K=top_k,
            BLOCK=1024,
            **depends,
        )

    if router.is_cuda and not memory.is_compiled:
        memory.is_compiled = True
        for limit, _ in SORTED_TILES:
            # The most tokens that go to this rung, or the first of the last one.
            average = SORTED_TILES[-2][0] + 1 if limit is None else limit
            num_tokens = max(average * num_experts // top_k, 1)
            x = router.new_empty(num_tokens, signature.hidden_size)
            steps(compile_only, x, x)
    return functools.partial(steps, run)
