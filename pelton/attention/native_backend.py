"""A kernel of our own on CPU, that reads keys and values where they lie; torch's fused attention
serves rows with many query tokens, and reads whole blocks."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.batch.input_batch import InputBatch
from pelton.core.kv.spec import KVGroup
from pelton.device.protocol import Device
from pelton.ops.paged_attention import (
    MAX_QUERY_LEN,
    NATIVE,
    AttentionMetadata,
    AttentionSignature,
)
from pelton.ops.qkv_attention import STORE_NATIVE, bind_composed
from pelton.ops.registry import BoundOp


class NativeBackend(PagedBackend):
    name = "native"
    reads_past_end = True

    def metadata(
        self, device: Device, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> AttentionMetadata:
        """Short rows: the kernels themselves read lengths, and leave padding slots out."""
        if batch.descriptor.max_query_len > MAX_QUERY_LEN:
            return super().metadata(device, batch, group, dtype)
        return self._view(batch, group)

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed(NATIVE, signature, STORE_NATIVE, **weights)
