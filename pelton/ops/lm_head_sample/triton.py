"""Two launches for few rows, head product and draw; for many rows the model's own head and two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton

from pelton.ops.lm_head_sample import FUSED_ROWS, DrawRows, HeadSignature
from pelton.ops.lm_head_sample.triton_kernels import head_tiles, logit_tiles, pick
from pelton.ops.registry import Kernel
from pelton.ops.triton_launch import Launch, compile_only, run

Head = Callable[[torch.Tensor, torch.Tensor], None]

# Measured on an H200, see docs/performance.md.
HEAD_TILE = {"BLOCK_N": 128, "BLOCK_K": 128, "STAGES": 3}
_HEAD_WARPS = 8
_PART = 8192  # logits of a row that a program looks through
_BLOCK_V = 1024
_ROWS = 256  # that there is memory for at first


class Parts:
    """Each tile's best, of up to max_rows rows of num_parts tiles."""

    def __init__(self, device: torch.device, max_rows: int, num_parts: int) -> None:
        self.num_parts = num_parts
        self.scores = torch.empty(max_rows * num_parts, dtype=torch.float32, device=device)
        self.ids = torch.empty(max_rows * num_parts, dtype=torch.int32, device=device)

    def pick(
        self,
        launch: Launch,
        num_rows: int,
        out_ids: torch.Tensor,
        out_status: torch.Tensor | None,
        out_max: torch.Tensor | None = None,
    ) -> None:
        block = triton.next_power_of_2(self.num_parts)
        launch(
            pick,
            (num_rows,),
            self.scores,
            self.ids,
            out_ids,
            out_status,
            out_max,
            self.num_parts,
            TELLS_MAX=out_max is not None,
            BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )


def fused(
    signature: HeadSignature, head: Head, weight: torch.Tensor, norm_weight: torch.Tensor
) -> Kernel:
    """No logits in memory at all."""
    vocab_size, hidden_size = weight.shape
    tile: dict[str, Any] = {**HEAD_TILE}
    if signature.dtype == torch.float32:
        # Without the matrix units a tile is held in registers.
        tile.update(BLOCK_K=32)
    parts = Parts(weight.device, FUSED_ROWS, triton.cdiv(vocab_size, tile["BLOCK_N"]))

    def steps(
        launch: Launch,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        launch(
            head_tiles,
            (parts.num_parts,),
            hidden,
            indices,
            weight,
            norm_weight,
            rows.slots,
            rows.positions,
            rows.temperature,
            rows.seeds,
            parts.scores,
            parts.ids,
            hidden.stride(0),
            len(indices),
            parts.num_parts,
            signature.norm_eps,
            H=hidden_size,
            V=vocab_size,
            BLOCK_T=FUSED_ROWS,
            num_warps=_HEAD_WARPS,
            **tile,
        )
        parts.pick(launch, len(indices), out_ids, out_status)

    if weight.is_cuda:
        rows = _nobody(weight.device)
        hidden = weight.new_empty(1, hidden_size)
        steps(compile_only, hidden, rows.slots, rows, hidden, rows.positions, rows.positions)
    return functools.partial(steps, run)


def from_logits(
    signature: HeadSignature, head: Head, weight: torch.Tensor, norm_weight: torch.Tensor
) -> Kernel:
    """The model's logits, looked through once."""
    draw = drawer(signature.vocab_size)
    if weight.is_cuda:
        rows = _nobody(weight.device)
        row = weight.new_empty(1, signature.vocab_size)
        draw(row, rows, rows.positions, rows.positions, compile_only)
    memory: list[torch.Tensor] = []

    def kernel(
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        num_rows = len(indices)
        if not memory or len(memory[-1]) < num_rows:
            # What a recorded step knows stays where it is.
            memory.append(hidden.new_empty((max(_ROWS, num_rows), hidden.shape[1])))
        chosen = memory[-1][:num_rows]
        torch.index_select(hidden, 0, indices, out=chosen)
        head(chosen, logits)
        draw(logits, rows, out_ids, out_status)

    return kernel


def _nobody(device: torch.device) -> DrawRows:
    """A row to compile kernels with, when a layer is bound rather than when requests wait."""
    return DrawRows(
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.ones(1, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )


@functools.cache
def shared_drawer(vocab_size: int) -> Callable[..., None]:
    """One `drawer` for all whose logits have so many columns, and one memory: they draw one after
    the other."""
    return drawer(vocab_size)


def drawer(vocab_size: int) -> Callable[..., None]:
    """reference.draw for logits of a vocabulary. With out_max instead of out_status: of logits that
    are divided by the temperature already, as ops/gumbel_argmax says."""
    num_parts = triton.cdiv(vocab_size, _PART)
    memory: list[Parts] = []

    def draw(
        logits: torch.Tensor,
        rows: DrawRows,
        out_ids: torch.Tensor,
        out_status: torch.Tensor | None,
        launch: Launch = run,
        out_max: torch.Tensor | None = None,
    ) -> None:
        num_rows = len(logits)
        if not memory or len(memory[-1].ids) < num_rows * num_parts:
            # What a recorded step knows stays where it is.
            memory.append(Parts(logits.device, max(_ROWS, num_rows), num_parts))
        parts = memory[-1]
        launch(
            logit_tiles,
            (num_rows, num_parts),
            logits,
            rows.slots,
            rows.positions,
            rows.temperature,
            rows.seeds,
            parts.scores,
            parts.ids,
            logits.stride(0),
            num_parts,
            V=vocab_size,
            DIVIDES=out_max is None,
            WIDTH=_PART,
            BLOCK_V=_BLOCK_V,
            num_warps=4,
        )
        parts.pick(launch, num_rows, out_ids, out_status, out_max)

    return draw
