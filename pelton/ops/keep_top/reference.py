from __future__ import annotations

import torch

from pelton.ops.top_k_top_p import top_k_top_p


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    values = torch.empty_like(logits)
    ids = torch.empty(logits.shape, dtype=torch.int32, device=logits.device)
    top_k_top_p(logits, top_k, top_p, values, ids)
    logits.scatter_(1, ids.long(), values)
