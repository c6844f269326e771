from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _min_p(logits, threshold, stride, V, BLOCK: tl.constexpr):
    """Program: row, gone through twice."""
    row = logits + tl.program_id(0).to(tl.int64) * stride
    share = tl.load(threshold + tl.program_id(0))
    if share > 0:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(row + columns, mask=columns < V, other=float("-inf")))
        lowest = tl.max(best, 0) + tl.log(share)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(row + columns, mask=columns < V, other=float("inf"))
            tl.store(row + columns, float("-inf"), mask=(columns < V) & (values < lowest))


def min_p(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    if logits.numel():
        _min_p[(len(logits),)](
            logits, threshold, logits.stride(0), logits.shape[1], BLOCK=_BLOCK, num_warps=16
        )
