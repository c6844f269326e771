from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops import step_tensors
from pelton.ops.step_tensors import RowTensors, StepArrays

TOTAL_LEN = tl.constexpr(step_tensors.TOTAL_LEN)
_BLOCK = 1024


@triton.jit(do_not_specialize=["width"])
def _ngram_propose(
    fields,
    tokens,
    idx_mapping,
    drafts,
    fields_stride,
    tokens_stride,
    drafts_stride,
    width,
    NUM_DRAFTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: a row. Of each place, how many tokens up to it are the text's last ones."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(idx_mapping + row).to(tl.int64)
    text = tokens + slot * tokens_stride
    total_len = tl.load(fields + slot * fields_stride + TOTAL_LEN)
    total_len = tl.minimum(tl.maximum(total_len, 1), width)
    last = total_len - 1
    best = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, last, BLOCK):
        place = start + tl.arange(0, BLOCK)
        same = place < last
        length = tl.zeros([BLOCK], tl.int32)
        for j in tl.static_range(MAX_N):
            same &= place >= j
            wanted = tl.load(text + tl.maximum(last - j, 0))
            same &= tl.load(text + place - j, mask=same, other=0) == wanted
            length += same.to(tl.int32)
        best = tl.maximum(best, tl.where(place < last, length * width + place, -1))
    score = tl.max(best)
    period = tl.maximum(last - score % width, 1)
    column = tl.arange(0, BLOCK_K)
    exists = column < NUM_DRAFTS
    # In one vector: Triton 3.9's interpreter takes no mask that a scalar has part in.
    is_found = tl.where(exists, score, -1) >= MIN_N * width
    found = tl.load(text + total_len - period + column % period, mask=is_found, other=-1)
    tl.store(drafts + row * drafts_stride + column, found, mask=exists)


def ngram_propose(
    rows: RowTensors, step: StepArrays, drafts: torch.Tensor, min_n: int, max_n: int, width: int
) -> None:
    num_rows, num_drafts = drafts.shape
    _ngram_propose[(num_rows,)](
        rows.fields,
        rows.tokens,
        step.idx_mapping,
        drafts,
        rows.fields.stride(0),
        rows.tokens.stride(0),
        drafts.stride(0),
        width,
        NUM_DRAFTS=num_drafts,
        BLOCK_K=triton.next_power_of_2(num_drafts),
        MIN_N=min_n,
        MAX_N=max_n,
        BLOCK=_BLOCK,
        num_warps=4,
    )
