"""What the engine asks of whoever runs its steps: one worker, or a group of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pelton.config.engine import EngineConfig
from pelton.core.kv.host_pages import MoveCosts
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import StepPlan
from pelton.runner.heads.protocol import StepOutcome


class StepWorker(Protocol):
    """config: as it was sized. groups: of KV. phases: seconds of each start phase."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def groups(self) -> tuple[KVGroup, ...]: ...

    @property
    def move_costs(self) -> MoveCosts: ...

    @property
    def phases(self) -> dict[str, float]: ...

    @property
    def runs_inline(self) -> bool:
        """Whether a step has ended when `execute` returns."""
        ...

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Queue a step; waits for nothing."""
        ...

    def record_next(self) -> bool:
        """Do a little of what nobody waits for; False if there is nothing."""
        ...

    def listen(self, on_failure: Callable[[Exception], object]) -> None:
        """Be told, perhaps from another thread, when it cannot go on."""
        ...

    def close(self) -> None: ...
