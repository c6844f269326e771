"""What the backends over plain paged KV share: the layout and the metadata's common part."""

from __future__ import annotations

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.core.kv.spec import KVGroup, LayerKV
from pelton.device.protocol import Device
from pelton.ops.paged_attention import AttentionMetadata


class PagedBackend:
    """KV as [num_blocks, block_size, 2, Hk, D]: a token's keys and values side by side. Quantised:
    uint8 [num_blocks, block_size, N], a token's codes and behind them its scales."""

    name = "paged"
    refreshes_in_place = False
    returns_lse = False
    reads_past_end = False

    def allocate(self, device: Device, layer: LayerKV, num_blocks: int) -> torch.Tensor:
        """The pool starts as any bytes; the null block is zero, since padding reads it."""
        size = layer.block_size
        if layer.scale_dtype is None:
            shape: tuple[int, ...] = (num_blocks, size, 2, layer.num_kv_heads, layer.head_dim)
            pool = device.empty(shape, getattr(torch, layer.dtype))
        else:
            pool = device.empty((num_blocks, size, layer.page_bytes // size), torch.uint8)
        device.launch(torch.Tensor.zero_, pool[0])
        return pool

    def metadata(
        self, device: Device, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> AttentionMetadata:
        meta = self._view(batch, group)
        device.launch(self._refresh, meta, batch, group, dtype)
        return meta

    def _view(self, batch: InputBatch, group: KVGroup) -> AttentionMetadata:
        """The batch's own tensors."""
        return AttentionMetadata(
            query_start_loc=batch.step.query_start_loc,
            seq_lens=batch.inputs.seq_lens,
            block_table=batch.inputs.block_tables[group.index],
            kv_slots=batch.inputs.slot_mappings[group.index],
            num_rows=batch.num_rows,
            query_lens=batch.query_len_np,
            seq_len_bounds=batch.seq_len_bound_np,
            bounds_are_exact=batch.bounds_are_exact,
            num_decode_rows=batch.num_decode_rows,
        )

    def _refresh(
        self, meta: AttentionMetadata, batch: InputBatch, group: KVGroup, dtype: torch.dtype
    ) -> None:
        """On the device. For a blank batch it runs anew in every step, and the step's lengths are
        known only now."""
        if batch.is_blank:
            meta.query_lens, meta.seq_len_bounds = batch.read_lengths()
            meta.num_rows = len(meta.query_lens)
            meta.bounds_are_exact = True
            meta.num_decode_rows = int(np.searchsorted(meta.query_lens, 1, side="right"))
            meta.kv_slots = batch.inputs.slot_mappings[group.index]
            meta.prepared.clear()
        self._prepare(meta, group, dtype)

    def _prepare(self, meta: AttentionMetadata, group: KVGroup, dtype: torch.dtype) -> None:
        """On the device, once per step and group."""
        # A padding token's slot is -1; index_copy takes no such thing, the null block does.
        meta.kv_slots = meta.kv_slots.clamp(min=0)
