from __future__ import annotations

import torch
import triton

from pelton.ops.rms_norm import reference
from pelton.ops.triton_product_kernels import rms_norm as kernel


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    if x.dtype == torch.float64:
        reference.rms_norm(x, weight, eps, out)
        return
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    if num_rows:
        kernel[(num_rows,)](
            x,
            weight,
            out,
            num_columns,
            x.stride(0),
            eps,
            BLOCK_K=block,
            DEPENDS=True,
            num_warps=min(16, max(1, block // 512)),
            launch_pdl=True,
        )
