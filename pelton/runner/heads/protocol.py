"""What happens to a step after its layers."""

from __future__ import annotations

from typing import Protocol

from pelton.core.plan import StepResult
from pelton.forward.in_flight import InFlight


class StepOutcome(Protocol):
    """The way to a step's result."""

    def is_done(self) -> bool:
        """Whether `collect` would not wait."""
        ...

    def collect(self) -> StepResult:
        """Wait for the result; call once."""
        ...


class Head(Protocol):
    """Sample, pool or relay: chosen once, in assemble.py."""

    def run(self, in_flight: InFlight) -> StepOutcome:
        """Queue the head's work, the copy to the host, and the advance of row state."""
        ...
