"""What an attention backend owns: KV layout, per-step metadata, and its kernel."""

from __future__ import annotations

from typing import Protocol

import torch

from pelton.batch.input_batch import InputBatch
from pelton.core.kv.spec import KVGroup, LayerKV
from pelton.device.protocol import Device
from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.registry import BoundOp


class AttentionBackend(Protocol):
    """One per engine; layers bind its kernel, the model state asks it for metadata.

    refreshes_in_place: whether a CUDA graph may hold what `metadata` queues for a blank batch, and
        the kernels: all that differs between steps is read by them from the batch's tensors. (On a
        CPU every backend's steps are recorded: kernels may read lengths there.)
    returns_lse: whether the kernel can give the log-sum-exp.
    reads_past_end: whether it reads blocks beyond a sequence's last token, whose bytes must then be
        finite (attention/zeroing.py).
    """

    name: str
    refreshes_in_place: bool
    returns_lse: bool
    reads_past_end: bool

    def allocate(self, device: Device, layer: LayerKV, num_blocks: int) -> torch.Tensor:
        """The layer's KV pool. No stride depends on num_blocks."""
        ...

    def metadata(
        self, device: Device, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> AttentionMetadata:
        """The group's view of a batch; queues whatever it computes on the device."""
        ...

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        """qkv_attention for one layer; weights as the op names them. Raises UnsupportedError with
        every candidate's reason."""
        ...
