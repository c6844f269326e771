from __future__ import annotations

import torch

from pelton.ops.block_weight import BlockWeight
from pelton.ops.native_product import STORE, bind_blocks, bind_native
from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel


def packed(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    return bind_native(signature, weight, mode=STORE, bias=bias)


def blocks(
    signature: ProductSignature, weight: BlockWeight, bias: torch.Tensor | None = None
) -> Kernel:
    return bind_blocks(signature, weight, mode=STORE, bias=bias)
