"""A kernel of our own on CPU, that reads keys and values where they lie; torch's fused attention
serves rows with many query tokens, and reads whole blocks."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.ops.paged_attention import NATIVE, AttentionSignature
from pelton.ops.qkv_attention import STORE_NATIVE, bind_composed
from pelton.ops.registry import BoundOp


class NativeBackend(PagedBackend):
    name = "native"
    reads_past_end = True

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed(NATIVE, signature, STORE_NATIVE, **weights)
