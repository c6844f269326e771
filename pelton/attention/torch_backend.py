"""torch's fused attention over gathered pages: the default without kernels of our own."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.core.kv.spec import KVGroup
from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature, sdpa
from pelton.ops.qkv_attention import compose
from pelton.ops.registry import Kernel


class TorchBackend(PagedBackend):
    name = "torch"
    reads_past_end = True

    def _prepare(self, meta: AttentionMetadata, group: KVGroup, dtype: torch.dtype) -> None:
        super()._prepare(meta, group, dtype)
        sdpa.prepare(meta, block_size=group.block_size, window=group.window, dtype=dtype)

    def kernel(self, signature: AttentionSignature) -> Kernel:
        return compose(signature, sdpa.paged_attention(signature))
