"""The reference, row by row."""

from __future__ import annotations

from pelton.attention.paged import PagedBackend
from pelton.ops.paged_attention import AttentionSignature, reference
from pelton.ops.qkv_attention import compose
from pelton.ops.registry import Kernel


class ReferenceBackend(PagedBackend):
    name = "reference"
    returns_lse = True

    def kernel(self, signature: AttentionSignature) -> Kernel:
        return compose(signature, reference.paged_attention(signature))
