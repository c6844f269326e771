from __future__ import annotations

import torch


def add_at(logits: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    writes = (token_ids >= 0) & (token_ids < logits.shape[1])
    # Idle entries add 0 to column 0: whatever the order of addition, its value is the same.
    logits.scatter_add_(1, torch.where(writes, token_ids, 0).long(), torch.where(writes, values, 0))
