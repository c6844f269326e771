from __future__ import annotations

import torch

from pelton.ops.product import ProductSignature, tiled_product
from pelton.ops.registry import Kernel


def matmul(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    weight_t = weight.t()

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        if bias is None:
            torch.mm(x, weight_t, out=out)
        else:
            torch.addmm(bias, x, weight_t, out=out)

    return kernel


def matvec(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        torch.mv(weight, x[0], out=out[0])

    return kernel


def tiled(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    weight_t = weight.t()

    def kernel(x: torch.Tensor, out: torch.Tensor) -> None:
        tiled_product(x, weight_t, out)
        if bias is not None:
            out.add_(bias)

    return kernel
