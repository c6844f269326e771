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
    """metadata: per layer, the same object for all layers of a KV group."""

    rope: RopeTensors
    metadata: tuple[AttentionMetadata, ...]


class DefaultModelState:
    """Full-attention decoders with one rotary table.

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
        cos, sin = rope_tables(config.rope, max_model_len, dtype)
        self._cos_table = cos.to(device.torch_device)
        self._sin_table = sin.to(device.torch_device)
        self._cos = device.zeros((max_tokens, cos.shape[1]), dtype)
        self._sin = device.zeros((max_tokens, sin.shape[1]), dtype)

    def prepare(self, batch: InputBatch) -> ModelInputs:
        """Queue what the layers of this step share."""
        num_tokens = batch.descriptor.num_tokens
        cos, sin = self._cos[:num_tokens], self._sin[:num_tokens]
        self._device.launch(self._gather, batch.inputs.positions, cos, sin)
        by_group = [
            self._backend.metadata(self._device, batch, group, self._dtype)
            for group in self._groups
        ]
        return ModelInputs(
            RopeTensors(cos[:, None], sin[:, None]),
            tuple(by_group[group] for group in self._group_of_layer),
        )

    def _gather(self, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        torch.index_select(self._cos_table, 0, positions[0], out=cos)
        torch.index_select(self._sin_table, 0, positions[0], out=sin)
