"""The reference, row by row."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.ops.paged_attention import REFERENCE, AttentionSignature
from pelton.ops.qkv_attention import bind_composed
from pelton.ops.registry import BoundOp


class ReferenceBackend(PagedBackend):
    name = "reference"
    returns_lse = True

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed(REFERENCE, signature, **weights)
