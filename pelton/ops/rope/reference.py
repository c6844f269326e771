from __future__ import annotations

import torch


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    half = sin.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    rotated = heads[..., : 2 * half] * cos
    rotated[..., :half].addcmul_(second, sin, value=-1)
    rotated[..., half:].addcmul_(first, sin)
    heads[..., : 2 * half].copy_(rotated)
