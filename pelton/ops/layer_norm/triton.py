from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.layer_norm import reference


@triton.jit
def _layer_norm(
    x, weight, bias, out, num_columns, x_stride, out_stride, eps,
    HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program norms a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / num_columns
    off = tl.where(inside, value - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(off * off, 0) / num_columns + eps)
    result = off * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    if x.dtype == torch.float64:
        reference.layer_norm(x, weight, bias, eps, out)
        return
    num_rows, num_columns = x.shape
    block = triton.next_power_of_2(num_columns)
    if num_rows:
        _layer_norm[(num_rows,)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            num_columns,
            x.stride(0),
            out.stride(0),
            eps,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
