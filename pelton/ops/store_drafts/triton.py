from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops import step_tensors
from pelton.ops.step_tensors import RowTensors, StepArrays

TOTAL_LEN = tl.constexpr(step_tensors.TOTAL_LEN)
NEXT_TOKENS = tl.constexpr(step_tensors.NEXT_TOKENS)
_ROWS = 32


@triton.jit(do_not_specialize=["num_rows"])
def _store_drafts(
    fields,
    live,
    idx_mapping,
    num_sampled,
    drafts,
    counts,
    fields_stride,
    num_sampled_stride,
    drafts_stride,
    max_len,
    vocab_size,
    num_rows,
    NUM_DRAFTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    is_live = row < tl.load(live)
    slot = tl.load(idx_mapping + row, mask=exists & is_live, other=0).to(tl.int64)
    sampled = tl.load(num_sampled + row * num_sampled_stride, mask=exists & is_live, other=0)
    state = fields + slot * fields_stride
    # The last place of the table holds a token whose successor nobody may ask for.
    room = max_len - 1 - tl.load(state + TOTAL_LEN, mask=exists & is_live, other=0)
    stands = exists & is_live & (sampled > 0)
    count = tl.zeros([ROWS], tl.int32)
    for column in tl.static_range(NUM_DRAFTS):
        draft = tl.load(drafts + row * drafts_stride + column, mask=exists, other=-1)
        stands &= (draft >= 0) & (draft < vocab_size) & (column < room)
        count += stands.to(tl.int32)
        place = state + NEXT_TOKENS + 1 + column
        tl.store(place, tl.where(stands, draft, -1), mask=exists & is_live)
    tl.store(counts + row, count, mask=exists)


def store_drafts(
    rows: RowTensors,
    step: StepArrays,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    vocab_size: int,
    counts: torch.Tensor,
) -> None:
    num_rows, num_drafts = drafts.shape
    _store_drafts[(triton.cdiv(num_rows, _ROWS),)](
        rows.fields,
        step.live,
        step.idx_mapping,
        num_sampled,
        drafts,
        counts,
        rows.fields.stride(0),
        num_sampled.stride(0),
        drafts.stride(0),
        rows.tokens.shape[1],
        vocab_size,
        num_rows,
        NUM_DRAFTS=num_drafts,
        ROWS=_ROWS,
        num_warps=1,
    )
