"""Runs a batch op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.recurrent_states import RecurrentStates
from pelton.core.descriptor import Descriptor, dispatch
from pelton.device.protocol import Device
from pelton.forward.stages import Stage
from pelton.layers.context import Communicator, StepBuffers, StepContext, Widths
from pelton.model_state.default import DefaultModelState
from pelton.models.protocol import Model


@dataclass(frozen=True, slots=True)
class Prepared:
    """is_sampled: never; the head comes after the executor."""

    batch: InputBatch
    ctx: StepContext
    is_sampled: bool = False


def as_live(descriptor: Descriptor) -> Descriptor:
    """No padding: eager steps run at their own size."""
    return dispatch(descriptor)


def allocate_buffers(
    device: Device, widths: Widths, max_tokens: int, dtype: torch.dtype
) -> StepBuffers:
    return StepBuffers(
        *(
            device.empty((max_tokens, width), dtype)
            for width in (
                widths.hidden,
                widths.qkv,
                widths.attention,
                widths.gate_up,
                widths.activation,
                widths.projected,
                widths.convolved,
                widths.scanned,
                widths.partial,
                widths.normed,
            )
        )
    )


class EagerExecutor:
    """Three verbs: `prepare` queues the step's inputs and what all layers share, `run` the layers,
    `finish` what comes after them.

    Args:
        build: queues the batch's inputs.
        choose: live shape -> executed shape; pads only where a test or a graph wants it.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        model_state: DefaultModelState,
        stage: Stage,
        buffers: StepBuffers,
        kv: Sequence[torch.Tensor],
        states: RecurrentStates,
        communicator: Communicator,
        choose: Callable[[Descriptor], Descriptor] = as_live,
        build: Callable[[InputBatch], None] = lambda batch: None,
    ) -> None:
        self._build = build
        self.choose = choose
        self.passes_on = stage.passes_on
        self._device = device
        self._model = model
        self._model_state = model_state
        self._stage = stage
        self._buffers = buffers
        self._kv = tuple(kv)
        self._states = states
        self._communicator = communicator

    def prepare(self, batch: InputBatch) -> Prepared:
        self._build(batch)
        inputs = self._model_state.prepare(batch)
        num_tokens = batch.descriptor.num_tokens
        ctx = StepContext(
            num_tokens=num_tokens,
            buffers=self._buffers.first(num_tokens),
            ropes=inputs.ropes,
            metadata=inputs.metadata,
            kv=self._kv,
            states=self._states,
            communicator=self._communicator,
        )
        return Prepared(batch, ctx)

    def run(self, prepared: Prepared) -> None:
        stage = self._stage
        stage.begin(prepared.batch, prepared.ctx)
        self._device.launch(self._model.run_layers, stage.lo, stage.hi, prepared.ctx, (), ())

    def run_one_of_each(self, prepared: Prepared) -> None:
        """Like `run`, of each kind of layer one: all kernels that the step needs."""
        stage, config, ctx = self._stage, self._model.config, prepared.ctx
        stage.begin(prepared.batch, ctx)
        kinds: dict[object, int] = {}
        for index in range(stage.lo, stage.hi):
            # Layers of a KV group have one object, and block tables of their own.
            kind = config.layer_kind(index), config.is_sparse(index), id(ctx.metadata[index])
            kinds.setdefault(kind, index)
        for index in kinds.values():
            self._device.launch(self._model.run_layers, index, index + 1, ctx, (), ())

    def unrecorded(self) -> list[tuple[Descriptor, bool]]:
        return []

    def warm(self, shape: Descriptor, is_sampled: bool) -> None:
        raise AssertionError("nothing of an eager executor is recorded")

    record = warm

    def finish(self, prepared: Prepared) -> torch.Tensor:
        """hidden: [T, H] as executed; valid in queue order."""
        self._stage.end(prepared.ctx)
        return prepared.ctx.buffers.hidden
