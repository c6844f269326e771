from __future__ import annotations

import torch

from pelton.ops.product import ProductSignature
from pelton.ops.registry import Kernel
from pelton.ops.triton_product import bind_few_rows, bind_fixed, bind_one_row


def one_row(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    return bind_one_row(signature, weight, bias=bias)


def few_rows(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    return bind_few_rows(signature, weight, bias=bias)


def fixed(
    signature: ProductSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    return bind_fixed(signature, weight, bias=bias)
