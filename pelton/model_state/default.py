"""Inputs beside token ids that a decoder needs: rotary tables, attention and recurrent metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pelton.attention.backend import AttentionBackend
from pelton.batch.input_batch import InputBatch
from pelton.batch.recurrent_states import RecurrentStates
from pelton.config.model import ModelConfig
from pelton.core.kv.spec import KVGroup
from pelton.device.protocol import Device
from pelton.layers.context import RopeTensors
from pelton.layers.encoder import EncoderMetadata
from pelton.layers.rope import rope_tables
from pelton.model_state.segments import Segments
from pelton.ops.bidirectional_attention import BidirectionalMetadata
from pelton.ops.paged_attention import AttentionMetadata
from pelton.ops.recurrent import RecurrentMetadata, needs_lengths, prepare, row_groups
from pelton.ops.step_kernels import step_kernel


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """ropes: one per rotary table. metadata: per layer, the same object for all layers of a KV
    group, and for all recurrent layers."""

    ropes: tuple[RopeTensors, ...]
    metadata: tuple[AttentionMetadata | RecurrentMetadata | BidirectionalMetadata, ...]


class DefaultModelState:
    """Decoders with rotary tables: the model's, and that of its window layers where it is another.

    Tables: cos [max_model_len, rotary_dim], sin [max_model_len, rotary_dim / 2].

    Args:
        groups: those with block tables; none where every token sees all others of its text.
        states: of the recurrent layers, if there are any.
        segments: where the second part of each row's text begins.
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        backend: AttentionBackend,
        groups: Sequence[KVGroup],
        states: RecurrentStates,
        segments: Segments,
        *,
        dtype: torch.dtype,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        self._device = device
        self._take_rows = step_kernel("take_rows", device.torch_device.type)
        self._backend = backend
        self._groups = tuple(groups)
        # The index of a layer's metadata: its group's, or behind them that of recurrent layers.
        at = {layer: group.index for group in groups for layer in group.layers}
        at |= dict.fromkeys(states.layer_indices, len(self._groups))
        self._metadata_of_layer = [at[layer] for layer in range(len(at))]
        self._segments = segments
        if not config.keeps_kv:
            self._metadata_of_layer = [0] * config.num_layers
        self._ring = states.ring if states.layer_indices else 0
        self._prepares = needs_lengths(dtype, device.torch_device.type)
        self._dtype = dtype
        self._tables: list[torch.Tensor] = []
        self._gathered: list[torch.Tensor] = []
        for rope in (config.rope, config.local_rope):
            if rope is not None:
                for table in rope_tables(rope, max_model_len, dtype):
                    self._tables.append(table.to(device.torch_device))
                    self._gathered.append(device.zeros((max_tokens, table.shape[1]), dtype))

    def prepare(self, batch: InputBatch) -> ModelInputs:
        """Queue what the layers of this step share."""
        num_tokens = batch.descriptor.num_tokens
        gathered = [tensor[:num_tokens] for tensor in self._gathered]
        self._device.launch(self._gather, batch.inputs.positions, gathered)
        metadata: list[AttentionMetadata | RecurrentMetadata | BidirectionalMetadata] = [
            self._backend.metadata(self._device, batch, group, self._dtype)
            for group in self._groups
        ]
        if self._ring:
            metadata.append(self._recurrent(batch))
        if not metadata:
            metadata.append(self._whole_texts(batch))
        return ModelInputs(
            tuple(
                RopeTensors(cos[:, None], sin[:, None])
                for cos, sin in zip(gathered[::2], gathered[1::2], strict=True)
            ),
            tuple(metadata[at] for at in self._metadata_of_layer),
        )

    def _whole_texts(self, batch: InputBatch) -> EncoderMetadata:
        assert not batch.is_blank, "attention among a step's own tokens reads lengths on the host"
        return EncoderMetadata(
            query_start_loc=batch.step.query_start_loc,
            num_rows=batch.num_rows,
            query_lens=batch.query_len_np,
            max_query_len=batch.descriptor.max_query_len,
            positions=batch.inputs.positions[0],
            token_types=self._segments.token_types(batch),
        )

    def _recurrent(self, batch: InputBatch) -> RecurrentMetadata:
        descriptor = batch.descriptor
        meta = RecurrentMetadata(
            idx_mapping=batch.step.idx_mapping,
            query_start_loc=batch.step.query_start_loc,
            seq_lens=batch.inputs.seq_lens,
            ring=self._ring,
            max_query_len=descriptor.max_query_len,
            is_single=descriptor.uniform_query_len == 1,
            groups=(),
            num_tokens=batch.num_tokens,
        )
        if self._prepares:
            meta.groups = row_groups(batch.query_len_np, batch.computed_bound_np)
            self._device.launch(self._prepare_recurrent, meta, batch)
        return meta

    def _prepare_recurrent(self, meta: RecurrentMetadata, batch: InputBatch) -> None:
        """On the device. A blank batch's rows are known only now."""
        if batch.is_blank:
            query_lens, seq_lens = batch.read_lengths()
            meta.groups = row_groups(query_lens, seq_lens - query_lens)
            meta.num_tokens = int(batch.step.live[1])
        prepare(meta)

    def _gather(self, positions: torch.Tensor, gathered: Sequence[torch.Tensor]) -> None:
        for table, out in zip(self._tables, gathered, strict=True):
            self._take_rows(table, positions[0], out)
