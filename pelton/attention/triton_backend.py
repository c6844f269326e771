"""Triton kernels for NVIDIA GPUs: one launch where every row has one query token, two or three
otherwise. Nothing is computed per step: the kernels read the batch's own tensors."""

from __future__ import annotations

import torch

from pelton.attention.paged import PagedBackend
from pelton.batch.input_batch import InputBatch
from pelton.core.kv.spec import KVGroup
from pelton.device.protocol import Device
from pelton.ops.paged_attention import AttentionMetadata, AttentionSignature
from pelton.ops.paged_attention.launch import StepShape, Workspace, is_fresh
from pelton.ops.qkv_attention import TRITON, TRITON_FIXED
from pelton.ops.registry import BoundOp, bind


class TritonBackend(PagedBackend):
    name = "triton"
    refreshes_in_place = True
    _candidates = TRITON

    def __init__(self) -> None:
        self._workspace: Workspace | None = None

    def metadata(
        self, device: Device, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> AttentionMetadata:
        """A padding token's slot is -1."""
        meta = self._view(batch, group)
        shape = batch.descriptor
        uniform = shape.uniform_query_len
        lens = batch.query_len_np
        meta.prepared["shape"] = StepShape(
            num_rows=shape.num_rows,
            num_tokens=shape.num_tokens,
            uniform_query_len=uniform if uniform * shape.num_rows == shape.num_tokens else 0,
            # A blank batch stands for steps of other lengths.
            min_query_len=1 if batch.is_blank else int(lens.min(initial=shape.max_query_len)),
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            is_fresh=batch.is_blank or is_fresh(lens, batch.seq_len_bound_np),
        )
        return meta

    def bind(self, signature: AttentionSignature, **weights: torch.Tensor) -> BoundOp:
        if self._workspace is None:
            self._workspace = Workspace(signature.device_type)
        return bind(
            "qkv_attention", self._candidates, signature, workspace=self._workspace, **weights
        )


class TritonInvariantBackend(TritonBackend):
    """Fixed tiles, splits and order of sums, for batch_invariant=True."""

    name = "triton_invariant"
    _candidates = TRITON_FIXED
