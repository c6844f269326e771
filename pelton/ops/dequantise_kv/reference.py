from __future__ import annotations

import torch

from pelton.ops.quantise_kv.reference import SCALE


def dequantise_kv(
    rows: torch.Tensor, num_kv_heads: int, head_dim: int, codes: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    num_codes = 2 * num_kv_heads * head_dim
    # float16 has not the scales' range.
    wide = dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)
    shape = (*rows.shape[:-1], 2, num_kv_heads)
    numbers = rows[..., :num_codes].view(codes).to(wide).view(*shape, head_dim)
    scale = rows[..., num_codes:].view(SCALE).view(*shape, 1)
    return numbers.mul_(scale).to(dtype)
