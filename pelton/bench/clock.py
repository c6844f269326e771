"""Where the time of one way from the host to the device goes."""

from __future__ import annotations

import time

PHASES = ("convert", "write", "launch", "device")


class Clock:
    """Seconds by phase; `lap` ends one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] += now - self._last
        self._last = now
