from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    out.copy_(F.rms_norm(x, (x.shape[1],), weight, eps))
