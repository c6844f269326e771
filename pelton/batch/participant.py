"""Hooks around a step, for whatever keeps state per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pelton.core.plan import BlockAppend, NewRow, SlotRef, StepPlan

if TYPE_CHECKING:
    from pelton.batch.input_batch import InputBatch


class StepParticipant:
    """Every hook does nothing unless it is overridden; the runner calls only overridden ones."""

    def begin_step(self, plan: StepPlan) -> None:
        """Before any other hook of the step: for whoever needs the plan as a whole."""

    def add_request(self, row: NewRow) -> None:
        """A request got row `row.ref.slot`; stage all of the row's state, old owners' included.

        Raises RequestError or any exception to refuse this request alone.
        """

    def append_blocks(self, append: BlockAppend) -> None:
        """A row's block table grew."""

    def remove_request(self, ref: SlotRef) -> None:
        """The row is free."""

    def apply_writes(self) -> None:
        """Stage what changed, right before the step's staged writes are flushed."""

    def before_forward(self, batch: InputBatch) -> None:
        """The staged writes are queued; the batch's inputs and the forward pass are not."""

    def after_forward(self, batch: InputBatch) -> None:
        """The forward pass is queued; the head may be, too."""

    def close(self) -> None:
        """The engine ends."""


def overridden(
    participants: Iterable[StepParticipant], hook: str
) -> tuple[Callable[..., Any], ...]:
    """Bound `hook` of each participant that overrides it, in order."""
    return tuple(
        getattr(participant, hook)
        for participant in participants
        if getattr(type(participant), hook) is not getattr(StepParticipant, hook)
    )
