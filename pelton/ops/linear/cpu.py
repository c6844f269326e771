from __future__ import annotations

import torch

from pelton.ops.native_product import STORE, bind_native
from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel


def packed(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    return bind_native(signature, weight, mode=STORE, bias=bias)
