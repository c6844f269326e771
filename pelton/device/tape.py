"""A recording as a list of launches, for devices whose kernels are plain calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Launch = tuple[Callable[..., object], tuple[Any, ...]]


class Tape:
    """launches: in order. launch: how the device runs or queues one."""

    def __init__(self, launches: list[Launch], launch: Callable[..., None]) -> None:
        self._launches = tuple(launches)
        self._launch = launch

    def __len__(self) -> int:
        return len(self._launches)

    def replay(self) -> None:
        for kernel, args in self._launches:
            self._launch(kernel, *args)


class Recorder:
    """Collects launches while `record` runs. `launches` is None at all other times."""

    def __init__(self) -> None:
        self.launches: list[Launch] | None = None

    def record(self, run: Callable[[], object]) -> list[Launch]:
        assert self.launches is None, "a recording inside a recording"
        found: list[Launch] = []
        self.launches = found
        try:
            run()
        finally:
            self.launches = None
        return found
