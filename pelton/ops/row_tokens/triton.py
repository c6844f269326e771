from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN

_BLOCK = 1024


@triton.jit(do_not_specialize=["width", "index_stride", "out_stride"])
def _row_tokens(
    fields,
    tokens,
    slots,
    index,
    out,
    width,
    L,
    fields_stride,
    index_stride,
    out_stride,
    TOTAL_LEN: tl.constexpr,
    FIRST_DRAFT: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = tl.load(index + row * index_stride + column, mask=inside, other=-1)
    total = tl.load(fields + slot * fields_stride + TOTAL_LEN)
    is_known = (place >= 0) & (place < total) & (place < L)
    found = tl.load(tokens + slot * L + place, mask=is_known, other=-1)
    draft = place - total
    is_draft = (place >= 0) & (draft >= 0) & (draft < NUM_DRAFTS)
    drafted = tl.load(
        fields + slot * fields_stride + FIRST_DRAFT + draft, mask=is_draft & inside, other=-1
    )
    tl.store(out + row * out_stride + column, tl.where(is_draft, drafted, found), mask=inside)


def row_tokens(
    fields: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
) -> None:
    num_rows, width = out.shape
    if not out.numel():
        return
    assert tokens.is_contiguous()
    _row_tokens[(num_rows, triton.cdiv(width, _BLOCK))](
        fields, tokens, slots, index, out, width, tokens.shape[1],
        fields.stride(0), index.stride(0), out.stride(0),
        TOTAL_LEN=TOTAL_LEN, FIRST_DRAFT=NEXT_TOKENS + 1,
        NUM_DRAFTS=fields.shape[1] - NEXT_TOKENS - 1, BLOCK=_BLOCK,
    )  # fmt: skip
