from __future__ import annotations

import torch

from pelton.ops.native_product import STORE, bind_native
from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel


def packed(
    signature: ProductSignature,
    weight: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Kernel:
    assert (norm_weight is None) == (signature.norm_eps is None)
    product = bind_native(signature, weight, mode=STORE, norm_weight=norm_weight, bias=bias)

    def kernel(x: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
        product(x, out)

    return kernel
