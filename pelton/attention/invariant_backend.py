"""Fixed tiles and splits, for batch_invariant=True."""

from __future__ import annotations

from pelton.attention.paged import PagedBackend
from pelton.ops.paged_attention import AttentionSignature, invariant
from pelton.ops.qkv_attention import compose
from pelton.ops.registry import Kernel


class InvariantBackend(PagedBackend):
    name = "invariant"
    returns_lse = True

    def kernel(self, signature: AttentionSignature) -> Kernel:
        return compose(signature, invariant.paged_attention(signature))
