from __future__ import annotations

import torch

from pelton.ops.quantise_kv.reference import SCALE


def dequantise_kv(
    rows: torch.Tensor, num_kv_heads: int, head_dim: int, codes: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    num_codes = 2 * num_kv_heads * head_dim
    shape = (*rows.shape[:-1], 2, num_kv_heads)
    numbers = rows[..., :num_codes].view(codes).to(dtype).view(*shape, head_dim)
    scale = rows[..., num_codes:].view(SCALE).view(*shape, 1)
    # Beside float16, which has not the scales' range, torch computes this in float32.
    return numbers.mul_(scale)
