"""What a group of workers is told, and what it says. Pickled: all of it is one installation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pelton.config.engine import EngineConfig
from pelton.core.kv.host_pages import MoveCosts
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import SlotRef, StepPlan
from pelton.worker.ring import RingHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What a worker inherits: descriptors by number, and who it is."""

    rank: int
    num_ranks: int
    control: int
    board: int
    orders: RingHandle
    answers: RingHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first order. meeting: a file that all ranks find each other by. tables: as in Start."""

    config: EngineConfig
    checkpoint: Any
    meeting: str
    log_level: int
    tables: dict[str, dict[str, str]]


@dataclass(frozen=True, slots=True)
class Step:
    """plan: without its rows, which are told as numbers: pickling a thousand small objects would
    take longer than the step. slots, generations: of the rows, as bytes of int32."""

    plan: StepPlan
    slots: bytes
    generations: bytes

    @classmethod
    def of(cls, plan: StepPlan) -> Step:
        slots, generations = zip(*plan.refs, strict=True) if plan.refs else ((), ())
        return cls(
            replace(plan, refs=[]),
            np.array(slots, np.int32).tobytes(),
            np.array(generations, np.int32).tobytes(),
        )

    def whole_plan(self) -> StepPlan:
        """As it was."""
        numbers = (
            np.frombuffer(data, np.int32).tolist() for data in (self.slots, self.generations)
        )
        self.plan.refs = list(map(SlotRef, *numbers))
        return self.plan


@dataclass(frozen=True, slots=True)
class RecordNext:
    """Answered with whether there was anything to record."""


@dataclass(frozen=True, slots=True)
class Close:
    """The last order."""


Order = Setup | Step | RecordNext | Close


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """phases: seconds. config: as the worker has sized it."""

    config: EngineConfig
    groups: tuple[KVGroup, ...]
    move_costs: MoveCosts
    phases: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """kind: the exception's class. message: what it says. traceback: as Python prints it."""

    kind: str
    message: str
    traceback: str
