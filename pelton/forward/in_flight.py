"""A launched step, between `start` and `finish`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.staged import StagedStep
from pelton.core.plan import SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What every outcome carries. failed: rows that could not be added, with the reason."""

    step_id: int
    staged: StagedStep
    failed: dict[SlotRef, Exception] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent(Launched):
    """This stage passed its hidden states on."""

    batch: InputBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Final(Launched):
    """The last layer ran. hidden: [T, H] as executed, before the final norm. is_sampled: so did the
    head, and the rows have advanced."""

    batch: InputBatch
    hidden: torch.Tensor
    is_sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing(Launched):
    """No row was scheduled: only row state changed."""


InFlight = Sent | Final | Nothing
