from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops import step_tensors
from pelton.ops.step_tensors import StepArrays

NEXT_TOKENS = tl.constexpr(step_tensors.NEXT_TOKENS)
_ROWS = 32


@triton.jit(do_not_specialize=["num_rows"])
def _verify(
    cu_num_logits,
    idx_mapping,
    fields,
    token_ids,
    status,
    out,
    fields_stride,
    out_stride,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    slot = tl.load(idx_mapping + row, mask=exists, other=0).to(tl.int64)
    first = tl.load(cu_num_logits + row, mask=exists, other=0)
    count = tl.load(cu_num_logits + row + 1, mask=exists, other=0) - first
    place = out + row.to(tl.int64) * out_stride
    stands = count > 0
    kept = tl.zeros([ROWS], tl.int32)
    unsound = tl.zeros([ROWS], tl.int32)
    for column in tl.static_range(NUM_COLUMNS):
        drawn = tl.load(token_ids + first + column, mask=stands, other=0)
        found = tl.load(status + first + column, mask=stands, other=0)
        unsound = tl.where(unsound == 0, found, unsound)
        kept += stands.to(tl.int32)
        tl.store(place + column, drawn, mask=exists)
        if column + 1 < NUM_COLUMNS:
            draft = tl.load(fields + slot * fields_stride + NEXT_TOKENS + 1 + column)
            stands &= (column + 1 < count) & (draft == drawn)
    tl.store(place + NUM_COLUMNS, kept, mask=exists)
    tl.store(place + NUM_COLUMNS + 1, unsound, mask=exists)


def verify(
    step: StepArrays,
    fields: torch.Tensor,
    token_ids: torch.Tensor,
    status: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_rows, width = out.shape
    _verify[(triton.cdiv(num_rows, _ROWS),)](
        step.cu_num_logits,
        step.idx_mapping,
        fields,
        token_ids,
        status,
        out,
        fields.stride(0),
        out.stride(0),
        num_rows,
        NUM_COLUMNS=width - 2,
        ROWS=_ROWS,
        num_warps=1,
    )
