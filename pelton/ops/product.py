"""What the product ops (linear, linear_add, norm_linear) share: signature, refusals, tiles."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

INVARIANT_TILE = 16
"""Rows of every product in batch-invariant mode: one shape, so one order of summation."""


_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_BLOCKS = "not for a weight in quantised blocks"


Activation = Literal["silu_mul", "gelu_tanh_mul", "gelu_mul", "gelu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSignature:
    """A product with a weight [out_features, in_features].

    activation: "..._mul" halves the output: silu, tanh-approximated or exact gelu (first half) *
        second half. "gelu": the exact one, of everything.
    norm_eps: of the RMS norm before the product (norm_linear), or None.
    in_blocks: the weight is a BlockWeight.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    device_type: str
    has_bias: bool = False
    batch_invariant: bool = False
    activation: Activation | None = None
    norm_eps: float | None = None
    in_blocks: bool = False

    @property
    def is_halved(self) -> bool:
        """Whether the activation makes one column of two."""
        return self.activation is not None and self.activation != "gelu"


def takes_any(signature: ProductSignature) -> str | None:
    if signature.in_blocks:
        return NO_BLOCKS
    return "its sums depend on the number of rows" if signature.batch_invariant else None


def takes_invariant(signature: ProductSignature) -> str | None:
    if signature.in_blocks:
        return NO_BLOCKS
    return None if signature.batch_invariant else "only for batch_invariant=True (slower)"


def takes_triton(signature: ProductSignature) -> str | None:
    """For kernels whose sums may depend on the number of rows."""
    return takes_any(signature) or _takes_hopper(signature)


def takes_triton_invariant(signature: ProductSignature) -> str | None:
    return takes_invariant(signature) or _takes_hopper(signature)


def _takes_hopper(signature: ProductSignature) -> str | None:
    if signature.device_type != "cuda":
        return "for an NVIDIA GPU"
    if signature.dtype not in _TRITON_DTYPES:
        return f"not in {signature.dtype}"
    if signature.activation == "gelu":
        return "an ungated gelu comes after the product"
    # Rows of 16 elements begin where a wide load, and the copy engine, may.
    if signature.in_features % 16:
        return "in_features is not a multiple of 16"
    if torch.cuda.get_device_capability()[0] != 9:
        return "for compute capability 9 (Hopper)"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def takes_single_row(signature: ProductSignature) -> str | None:
    if signature.has_bias:
        return "has a bias"
    if signature.device_type != "cpu":
        return "only faster on CPU"
    return takes_any(signature)


def tiled_product(x: torch.Tensor, weight_t: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, M] = x [T, K] @ weight_t [K, M], always INVARIANT_TILE rows at a time."""
    num_rows = x.shape[0]
    whole = num_rows - num_rows % INVARIANT_TILE
    for start in range(0, whole, INVARIANT_TILE):
        end = start + INVARIANT_TILE
        torch.mm(x[start:end], weight_t, out=out[start:end])
    if whole < num_rows:
        tile = x.new_zeros((INVARIANT_TILE, x.shape[1]))
        tile[: num_rows - whole] = x[whole:]
        out[whole:] = torch.mm(tile, weight_t)[: num_rows - whole]
