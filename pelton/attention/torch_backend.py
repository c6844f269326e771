"""torch's fused attention over gathered pages: the default without kernels of our own."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.core.kv.spec import KVGroup
from pelton.ops.paged_attention import SDPA, AttentionMetadata, AttentionSignature, sdpa
from pelton.ops.qkv_attention import bind_composed
from pelton.ops.registry import BoundOp


class TorchBackend(PagedBackend):
    name = "torch"
    reads_past_end = True

    def _prepare(self, meta: AttentionMetadata, group: KVGroup, dtype: torch.dtype) -> None:
        super()._prepare(meta, group, dtype)
        sdpa.prepare(meta, block_size=group.block_size, window=group.window, dtype=dtype)

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed(SDPA, signature, **weights)
