"""Kernels of our own on CPU, that read keys and values where they lie."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.batch.input_batch import InputBatch
from pelton.core.kv.spec import KVGroup
from pelton.device.protocol import Device
from pelton.ops.paged_attention import NATIVE, AttentionMetadata, AttentionSignature
from pelton.ops.qkv_attention import STORE_NATIVE, bind_composed
from pelton.ops.registry import BoundOp


class NativeBackend(PagedBackend):
    name = "native"

    def metadata(
        self, device: Device, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> AttentionMetadata:
        """The kernels themselves read lengths, and leave padding slots out."""
        return self._view(batch, group)

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        return bind_composed(NATIVE, signature, STORE_NATIVE, **weights)
