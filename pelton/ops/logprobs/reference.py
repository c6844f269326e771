from __future__ import annotations

import torch

from pelton.ops.top_k_top_p.reference import ordered_top_k

_CPU_ROWS = 16
"""At a time: what is made of so many stays in a CPU's caches, and takes half the time."""


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
    out_top_ids: torch.Tensor,
    out_top_logprobs: torch.Tensor,
) -> None:
    num_rows = _CPU_ROWS if logits.device.type == "cpu" else max(len(logits), 1)
    outputs = (out_logprobs, out_ranks, out_top_ids, out_top_logprobs)
    for first in range(0, len(logits), num_rows):
        rows = slice(first, first + num_rows)
        _logprobs(logits[rows], token_ids[rows], *(output[rows] for output in outputs))


def _logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    out_logprobs: torch.Tensor,
    out_ranks: torch.Tensor,
    out_top_ids: torch.Tensor,
    out_top_logprobs: torch.Tensor,
) -> None:
    values = logits.to(torch.float32)
    log_softmax = values.log_softmax(-1)
    columns = token_ids.long()[:, None]
    out_logprobs.copy_(log_softmax.gather(1, columns)[:, 0])
    out_ranks.copy_((values > values.gather(1, columns)).sum(-1, dtype=torch.int32).add_(1))
    width = out_top_ids.shape[1]
    if width:
        _, ids = ordered_top_k(values, width)
        out_top_ids.copy_(ids)
        out_top_logprobs.copy_(log_softmax.gather(1, ids))
