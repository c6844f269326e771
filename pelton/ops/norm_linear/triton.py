from __future__ import annotations

import torch

from pelton.ops.linear import reference as linear
from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel
from pelton.ops.triton_product import (
    Product,
    bind_activate,
    bind_few_rows,
    bind_fixed,
    bind_norm,
    bind_one_row,
)


def one_row(
    signature: ProductSignature,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    product = bind_one_row(signature, weight, norm_weight=norm_weight, bias=bias)

    def kernel(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        product(x, out)

    return kernel


def few_rows(
    signature: ProductSignature,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    return _after_norm(signature, norm_weight, bind_few_rows(signature, weight, bias=bias))


def fixed(
    signature: ProductSignature,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    return _after_norm(signature, norm_weight, bind_fixed(signature, weight, bias=bias))


def many_rows(
    signature: ProductSignature,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    """The product by cuBLAS, between a kernel for the norm and one for the activation."""
    product = linear.matmul(signature, weight, bias)
    if signature.activation is None:
        return _after_norm(signature, norm_weight, product)
    normed = bind_norm(signature, norm_weight)
    activated = bind_activate(signature, weight)

    def kernel(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        product(normed(x), scratch)
        activated(scratch, out)

    return kernel


def _after_norm(
    signature: ProductSignature, norm_weight: torch.Tensor | None, product: Product
) -> Kernel:
    assert (norm_weight is None) == (signature.norm_eps is None)
    normed = bind_norm(signature, norm_weight)

    def kernel(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        product(normed(x), out)

    return kernel
