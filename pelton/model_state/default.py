"""Inputs beside token ids that a plain decoder needs: rotary tables and attention metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pelton.attention.backend import AttentionBackend
from pelton.batch.input_batch import InputBatch
from pelton.config.model import ModelConfig
from pelton.core.kv.spec import KVGroup
from pelton.device.protocol import Device
from pelton.layers.context import RopeTensors
from pelton.layers.rope import rope_tables
from pelton.ops.paged_attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """ropes: one per rotary table. metadata: per layer, the same object for all layers of a KV
    group."""

    ropes: tuple[RopeTensors, ...]
    metadata: tuple[AttentionMetadata, ...]


class DefaultModelState:
    """Decoders with rotary tables: the model's, and that of its window layers where it is another.

    Tables: cos [max_model_len, rotary_dim], sin [max_model_len, rotary_dim / 2].
    """

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        backend: AttentionBackend,
        groups: Sequence[KVGroup],
        *,
        dtype: torch.dtype,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        self._device = device
        self._backend = backend
        self._groups = tuple(groups)
        group_of = {layer: group.index for group in groups for layer in group.layers}
        self._group_of_layer = [group_of[layer] for layer in range(len(group_of))]
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
        by_group = [
            self._backend.metadata(self._device, batch, group, self._dtype)
            for group in self._groups
        ]
        return ModelInputs(
            tuple(
                RopeTensors(cos[:, None], sin[:, None])
                for cos, sin in zip(gathered[::2], gathered[1::2], strict=True)
            ),
            tuple(by_group[group] for group in self._group_of_layer),
        )

    def _gather(self, positions: torch.Tensor, gathered: Sequence[torch.Tensor]) -> None:
        for table, out in zip(self._tables, gathered, strict=True):
            torch.index_select(table, 0, positions[0], out=out)
