from __future__ import annotations

import torch

from pelton.ops.block_weight import BlockWeight
from pelton.ops.native_product import STORE, Product, bind_blocks, bind_native
from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel


def packed(
    signature: ProductSignature,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    assert (norm_weight is None) == (signature.norm_eps is None)
    return _without_scratch(
        bind_native(signature, weight, mode=STORE, norm_weight=norm_weight, bias=bias)
    )


def blocks(
    signature: ProductSignature,
    weight: BlockWeight,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    assert (norm_weight is None) == (signature.norm_eps is None)
    return _without_scratch(
        bind_blocks(signature, weight, mode=STORE, norm_weight=norm_weight, bias=bias)
    )


def _without_scratch(product: Product) -> Kernel:
    def kernel(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        product(x, out)

    return kernel
