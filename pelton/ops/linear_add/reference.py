from __future__ import annotations

import torch

from pelton.ops.product import ProductSignature, tiled_product
from pelton.ops.registry import Kernel


def matmul(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    weight_t = weight.t()

    def kernel(x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.addmm_(x, weight_t)
        if bias is not None:
            residual.add_(bias)

    return kernel


def matvec(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    def kernel(x: torch.Tensor, residual: torch.Tensor) -> None:
        residual[0].addmv_(weight, x[0])

    return kernel


def tiled(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    weight_t = weight.t()

    def kernel(x: torch.Tensor, residual: torch.Tensor) -> None:
        product = torch.empty_like(residual)
        tiled_product(x, weight_t, product)
        residual.add_(product)
        if bias is not None:
            residual.add_(bias)

    return kernel
