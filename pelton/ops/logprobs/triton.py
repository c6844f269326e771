"""One pass over the logits, in the type that they have; the most likely tokens are found by the
kernels of ops/top_k_top_p."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.logprobs import reference
from pelton.ops.top_k_top_p import MAX_CANDIDATES
from pelton.ops.top_k_top_p.triton import top_k_top_p

_BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["token_ids", "out_logprobs", "out_ranks"])
def _look_through(
    logits, token_ids, out_logprobs, out_ranks, tops, log_sums, stride, V, BLOCK: tl.constexpr
):
    """tops, log_sums: [N] float32, the largest logit and the logarithm of the sum of exp(logit -
    largest). Program: row."""
    row = tl.program_id(0)
    place = logits + row.to(tl.int64) * stride
    own = tl.load(place + tl.load(token_ids + row)).to(tl.float32)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    larger = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(place + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        larger += (values > own).to(tl.int32)
        now = tl.maximum(best, values)
        # A lane that has seen nothing but -inf has nothing to be scaled.
        kept = tl.where(best == float("-inf"), 0.0, total * tl.exp(best - now))
        total = kept + tl.where(values == float("-inf"), 0.0, tl.exp(values - now))
        best = now
    top = tl.max(best, 0)
    total = tl.sum(tl.where(best == float("-inf"), 0.0, total * tl.exp(best - top)), 0)
    log_sum = tl.log(total)
    tl.store(out_logprobs + row, own - top - log_sum)
    tl.store(out_ranks + row, tl.sum(larger, 0) + 1)
    tl.store(tops + row, top)
    tl.store(log_sums + row, log_sum)


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
    out_top_ids: torch.Tensor,
    out_top_logprobs: torch.Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    width = out_top_ids.shape[1]
    if not num_rows:
        return
    if logits.dtype == torch.float64 or width > MAX_CANDIDATES:
        reference.logprobs(
            logits, token_ids, out_logprobs, out_ranks, out_top_ids, out_top_logprobs
        )
        return
    tops = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    log_sums = torch.empty_like(tops)
    _look_through[(num_rows,)](
        logits, token_ids, out_logprobs, out_ranks, tops, log_sums, logits.stride(0), vocab_size,
        BLOCK=_BLOCK, num_warps=16,
    )  # fmt: skip
    if width:
        top_k = torch.full((num_rows,), width, dtype=torch.int32, device=logits.device)
        top_p = torch.ones(num_rows, dtype=torch.float32, device=logits.device)
        values = torch.empty((num_rows, width), dtype=torch.float32, device=logits.device)
        ids = torch.empty((num_rows, width), dtype=torch.int32, device=logits.device)
        top_k_top_p(logits, top_k, top_p, values, ids, keeps_dropped=True)
        out_top_ids.copy_(ids)
        torch.sub(values.sub_(tops[:, None]), log_sums[:, None], out=out_top_logprobs)
