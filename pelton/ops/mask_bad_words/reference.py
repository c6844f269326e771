from __future__ import annotations

import torch

from pelton.ops.mask_stop_ids import mask_stop_ids


def mask_bad_words(logits: torch.Tensor, words: torch.Tensor, recent: torch.Tensor) -> None:
    before = words[:, :, 1:]
    is_complete = ((before == -1) | (before == recent[:, None])).all(-1)
    every_row = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
    mask_stop_ids(logits, torch.where(is_complete, words[:, :, 0], -1), every_row)
