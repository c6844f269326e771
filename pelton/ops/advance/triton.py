from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops import step_tensors
from pelton.ops.step_tensors import RowTensors, StepArrays

TOTAL_LEN = tl.constexpr(step_tensors.TOTAL_LEN)
NUM_COMPUTED = tl.constexpr(step_tensors.NUM_COMPUTED)
NEXT_TOKENS = tl.constexpr(step_tensors.NEXT_TOKENS)
_ROWS = 32


@triton.jit
def _advance(
    fields,
    tokens,
    live,
    idx_mapping,
    query_start_loc,
    cu_num_logits,
    sampled,
    num_sampled,
    fields_stride,
    tokens_stride,
    sampled_stride,
    num_sampled_stride,
    max_len,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_live = row < tl.load(live)
    slot = tl.load(idx_mapping + row, mask=is_live, other=0).to(tl.int64)
    kept = tl.load(num_sampled + row * num_sampled_stride, mask=is_live, other=0)
    query_len = tl.load(query_start_loc + row + 1, mask=is_live, other=0)
    query_len -= tl.load(query_start_loc + row, mask=is_live, other=0)
    num_logits = tl.load(cu_num_logits + row + 1, mask=is_live, other=0)
    num_logits -= tl.load(cu_num_logits + row, mask=is_live, other=0)
    state = fields + slot * fields_stride
    total_len = tl.load(state + TOTAL_LEN, mask=is_live, other=0)
    newest = tl.zeros([ROWS], tl.int32)
    for column in tl.static_range(NUM_COLUMNS):
        is_kept = kept > column
        token = tl.load(sampled + row * sampled_stride + column, mask=is_kept, other=0)
        at = total_len + column
        place = tokens + slot * tokens_stride + at
        tl.store(place, token, mask=is_kept & (at < max_len))
        newest = tl.where(is_kept, token, newest)
    rejected = tl.where(num_logits > 0, num_logits - kept, 0)
    computed = tl.load(state + NUM_COMPUTED, mask=is_live, other=0)
    tl.store(state + TOTAL_LEN, total_len + kept, mask=is_live)
    tl.store(state + NUM_COMPUTED, computed + query_len - rejected, mask=is_live)
    tl.store(state + NEXT_TOKENS, newest, mask=kept > 0)


def advance(
    rows: RowTensors, step: StepArrays, sampled: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    _advance[(triton.cdiv(len(step.idx_mapping), _ROWS),)](
        rows.fields,
        rows.tokens,
        step.live,
        step.idx_mapping,
        step.query_start_loc,
        step.cu_num_logits,
        sampled,
        num_sampled,
        rows.fields.stride(0),
        rows.tokens.stride(0),
        sampled.stride(0),
        num_sampled.stride(0),
        rows.tokens.shape[1],
        NUM_COLUMNS=sampled.shape[1],
        ROWS=_ROWS,
        num_warps=1,
    )
