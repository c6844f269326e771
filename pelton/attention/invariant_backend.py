"""Fixed tiles and splits, for batch_invariant=True."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.ops.paged_attention import INVARIANT, AttentionSignature
from pelton.ops.qkv_attention import bind_composed
from pelton.ops.registry import BoundOp


class InvariantBackend(PagedBackend):
    name = "invariant"
    returns_lse = True

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed(INVARIANT, signature, **weights)
