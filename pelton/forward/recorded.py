"""Runs a batch by replaying what was recorded of its shape.

A recording holds a step from its inputs to its last layer, and for plain rows the head, the
sampling and the advance of the rows too. Everything in it reads fixed device addresses: what
differs from step to step is in the header and in row state. It is made of a blank batch, whose host
arrays are bounds of the shape, so no step's own numbers can get into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pelton.batch.input_batch import InputBatch
from pelton.core.descriptor import Descriptor
from pelton.device.protocol import Device, Recording
from pelton.forward.dispatch import Ladder
from pelton.forward.eager import EagerExecutor, Prepared, as_live


class RecordableHead(Protocol):
    """What the executor must know of a head."""

    def is_plain(self, batch: InputBatch) -> bool:
        """Whether what follows the layers depends on the device's state and the shape alone."""
        ...

    def launch_plain(self, batch: InputBatch, hidden: torch.Tensor) -> None:
        """Queue that: tokens are drawn and verified, and the rows advance."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """hidden: [T, H] as executed, which a replay fills. is_sampled: the head is part of it."""

    recording: Recording
    hidden: torch.Tensor
    is_sampled: bool


class RecordedExecutor:
    """The eager executor's verbs; shapes that are not on the ladder, or not recorded yet, are the
    eager executor's, and so are steps with embeddings of prompts.

    num_replayed counts steps. is_paused: every step is the eager executor's.

    Args:
        blank: a batch of a shape, without a step's own numbers.
    """

    def __init__(
        self,
        device: Device,
        eager: EagerExecutor,
        head: RecordableHead,
        ladder: Ladder,
        blank: Callable[[Descriptor], InputBatch],
    ) -> None:
        assert not eager.passes_on, "a stage that sends its hidden states on is not recorded"
        self.passes_on = False
        self._device = device
        self._eager = eager
        self._head = head
        self._ladder = ladder
        self._blank = blank
        self._steps: dict[tuple[Descriptor, bool], RecordedStep] = {}
        self.num_replayed = 0
        self.is_paused = False

    def choose(self, live: Descriptor) -> Descriptor:
        shape = None if self.is_paused or live.has_embeds else self._ladder.choose(live)
        if shape is None or not (self._device.records_when_asked or self._has(shape)):
            return as_live(live)
        return shape

    def prepare(self, batch: InputBatch) -> Prepared | RecordedStep:
        if batch.descriptor.mode == "eager":
            return self._eager.prepare(batch)
        return self.record(batch.descriptor, self._head.is_plain(batch))

    def run(self, prepared: Prepared | RecordedStep) -> None:
        if isinstance(prepared, RecordedStep):
            self.num_replayed += 1
            prepared.recording.replay()
        else:
            self._eager.run(prepared)

    def finish(self, prepared: Prepared | RecordedStep) -> torch.Tensor:
        """hidden: [T, H] as executed; valid in queue order."""
        if isinstance(prepared, RecordedStep):
            return prepared.hidden
        return self._eager.finish(prepared)

    def record(self, shape: Descriptor, is_sampled: bool) -> RecordedStep:
        """The recording of a shape, made now unless it is there."""
        key = shape, is_sampled
        if key not in self._steps:
            batch = self._blank(shape)
            hidden: list[torch.Tensor] = []
            recording = self._device.record(
                lambda: hidden.append(self._launch(batch, is_sampled, self._eager.run))
            )
            self._steps[key] = RecordedStep(recording, hidden[-1], is_sampled)
        return self._steps[key]

    def unrecorded(self) -> list[tuple[Descriptor, bool]]:
        """What of the ladder is not recorded yet, small shapes first, those with a head before all
        others."""
        shapes = list(self._ladder.shapes())
        keys = [(shape, is_sampled) for is_sampled in (True, False) for shape in shapes]
        return [key for key in keys if key not in self._steps]

    def warm(self, shape: Descriptor, is_sampled: bool) -> None:
        """Queue every kernel that a recording of the shape would hold, if not for every layer."""
        self._launch(self._blank(shape), is_sampled, self._eager.run_one_of_each)

    def _launch(
        self, batch: InputBatch, is_sampled: bool, run_layers: Callable[[Prepared], None]
    ) -> torch.Tensor:
        prepared = self._eager.prepare(batch)
        run_layers(prepared)
        hidden = self._eager.finish(prepared)
        if is_sampled:
            self._head.launch_plain(batch, hidden)
        return hidden

    def _has(self, shape: Descriptor) -> bool:
        return (shape, True) in self._steps and (shape, False) in self._steps
