from __future__ import annotations

import torch


def keep_only(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    is_kept = (token_ids >= 0) & (token_ids < logits.shape[1])
    has_list = token_ids[:, :1] != -1
    mask = torch.where(has_list, -torch.inf, 0.0).to(logits.dtype).repeat(1, logits.shape[1])
    # A maximum with -inf changes nothing, so idle entries may all point at column 0.
    floor = torch.where(is_kept, 0.0, -torch.inf).to(logits.dtype)
    mask.scatter_reduce_(1, torch.where(is_kept, token_ids, 0).long(), floor, "amax")
    logits.add_(mask)
