"""What follows the last layer, wired: an engine samples or pools."""

from __future__ import annotations

from typing import Protocol

import torch

from pelton.batch.input_buffers import InputBuffers
from pelton.batch.participant import StepParticipant
from pelton.batch.row_state import RowState
from pelton.batch.staged import Staging
from pelton.config.engine import EngineConfig
from pelton.device.protocol import Device
from pelton.layers.context import Communicator
from pelton.models.protocol import Model
from pelton.ops.step_tensors import RowTensors
from pelton.pooling.pooler import Pooler
from pelton.runner.heads.pool import PoolHead
from pelton.runner.heads.protocol import Head
from pelton.runner.heads.results import ResultRing
from pelton.runner.heads.sample import SampleHead
from pelton.sampling.gathered_head import GatheredHead
from pelton.sampling.logits_source import VocabularyHead
from pelton.sampling.prompt_logprobs import PromptLogprobRows
from pelton.sampling.rows import SamplingRows
from pelton.sampling.sampler import Sampler
from pelton.speculation.drafting import make_drafting


class End(Protocol):
    """Made before the staging area gets its addresses, connected after that.

    participants: of its rows, before all others.
    """

    participants: list[StepParticipant]

    def connect(self, rows: RowTensors, buffers: InputBuffers) -> list[StepParticipant]:
        """The device's rows are there. Returns participants that come behind all others."""
        ...

    def head(self) -> Head: ...


class SamplingEnd:
    """Tokens come out."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        model: Model,
        communicator: Communicator,
        staging: Staging,
        rows: RowState,
    ) -> None:
        self._config = config
        self._device = device
        self._vocabulary: VocabularyHead = model
        if communicator.size > 1:
            dtype = getattr(torch, config.dtype)
            self._vocabulary = GatheredHead(model, communicator, dtype, device.torch_device.type)
        self._num_rows = rows.num_rows
        self._max_logprobs = min(config.max_logprobs, config.model.vocab_size)
        self._sampling_rows = SamplingRows(
            staging,
            num_rows=rows.num_rows,
            vocab_size=config.model.vocab_size,
            max_logprobs=self._max_logprobs,
        )
        self.participants: list[StepParticipant] = [self._sampling_rows]

    def connect(self, rows: RowTensors, buffers: InputBuffers) -> list[StepParticipant]:
        self._rows = rows
        self._max_logits = buffers.max_logits
        self._prompt_logprobs = PromptLogprobRows(
            self._device,
            rows,
            self._vocabulary.head,
            num_rows=self._num_rows,
            max_tokens=self._config.scheduler.max_num_batched_tokens,
            max_logprobs=self._max_logprobs,
        )
        return [self._prompt_logprobs]

    def head(self) -> SampleHead:
        config, device = self._config, self._device
        max_rows, num_drafts = config.scheduler.max_num_seqs, config.num_speculative_tokens
        return SampleHead(
            device,
            self._vocabulary,
            Sampler.for_device(device, self._sampling_rows, self._rows),
            self._prompt_logprobs,
            self._rows,
            ResultRing(
                device,
                depth=config.scheduler.max_steps_in_flight,
                max_rows=max_rows,
                num_drafts=num_drafts,
                max_logits=self._max_logits,
                max_logprobs=self._max_logprobs,
            ),
            make_drafting(device, config),
            max_rows=max_rows,
            num_drafts=num_drafts,
            max_logits=self._max_logits,
            max_logprobs=self._max_logprobs,
            dtype=getattr(torch, config.dtype),
        )


class PoolingEnd:
    """Vectors and scores come out."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        model: Model,
        communicator: Communicator,
        staging: Staging,
        rows: RowState,
    ) -> None:
        self._device = device
        self._max_rows = config.scheduler.max_num_seqs
        self._depth = config.scheduler.max_steps_in_flight
        self._pooler = Pooler(
            device,
            model,
            config.pooling,
            num_rows=rows.num_rows,
            max_tokens=config.scheduler.max_num_batched_tokens,
            dtype=getattr(torch, config.dtype),
            batch_invariant=config.batch_invariant,
        )
        self.participants: list[StepParticipant] = [self._pooler]

    def connect(self, rows: RowTensors, buffers: InputBuffers) -> list[StepParticipant]:
        self._rows = rows
        return []

    def head(self) -> PoolHead:
        return PoolHead(
            self._device, self._pooler, self._rows, depth=self._depth, max_rows=self._max_rows
        )


def make_end(
    config: EngineConfig,
    device: Device,
    model: Model,
    communicator: Communicator,
    staging: Staging,
    rows: RowState,
) -> End:
    """The one that the configuration asks for."""
    kind = PoolingEnd if config.pools else SamplingEnd
    return kind(config, device, model, communicator, staging, rows)
