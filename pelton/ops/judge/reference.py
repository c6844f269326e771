from __future__ import annotations

import torch

from pelton.core.plan import ALL_MASKED, NAN_LOGITS, OK


def judge(
    raw_max: torch.Tensor, out_max: torch.Tensor, out_ids: torch.Tensor, out_status: torch.Tensor
) -> None:
    # NaN compares false.
    is_sound = (raw_max < torch.inf) & (out_max < torch.inf)
    masked = torch.where(out_max == -torch.inf, ALL_MASKED, OK)
    status = torch.where(is_sound, masked, NAN_LOGITS)
    out_status.copy_(status)
    out_ids.mul_(status == OK)
