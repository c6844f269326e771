from __future__ import annotations

import torch


def mask_stop_ids(logits: torch.Tensor, stop_ids: torch.Tensor, is_active: torch.Tensor) -> None:
    writes = is_active[:, None] & (stop_ids >= 0) & (stop_ids < logits.shape[1])
    # A minimum with +inf changes nothing, so idle entries may all point at column 0.
    ceiling = torch.where(writes, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, torch.where(writes, stop_ids, 0).long(), ceiling, "amin")
