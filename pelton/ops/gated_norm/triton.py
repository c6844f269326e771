from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.gated_norm import GatedNormSignature
from pelton.ops.registry import Kernel


@triton.jit
def gate_and_norm(
    x, gate, weight, stride_x, stride_gate, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Program: (row, group)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    column += tl.program_id(1) * SIZE
    place = x + row * stride_x + column
    g = tl.load(gate + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * (g / (1 + tl.exp(-g)))
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    tl.store(place, (value.to(dtype).to(tl.float32) * w).to(dtype), mask=inside)


def gated_norm(signature: GatedNormSignature, weight: torch.Tensor) -> Kernel:
    block = triton.next_power_of_2(signature.group_size)

    def kernel(x: torch.Tensor, gate: torch.Tensor) -> None:
        if len(x):
            gate_and_norm[(len(x), signature.num_groups)](
                x, gate, weight, x.stride(0), gate.stride(0), signature.eps,
                SIZE=signature.group_size, BLOCK=block, num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip

    return kernel
