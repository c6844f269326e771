"""What a process makes beside launches, counted: while a step is recorded it should make nothing.

What is allocated, opened or begun in the midst of a capture either breaks the capture, or belongs
to it and is made anew in each one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

_THREADS, _FILES = "/proc/self/task", "/proc/self/fd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Counts, from a moment on that is the same for all; differences are what counts.

    allocations: of device memory by torch, libraries' workspaces among them. segments: those for
    which the driver was asked. threads: of the process, Python's or not. files: open ones, among
    them what drivers and libraries wait at.
    """

    allocations: int = 0
    segments: int = 0
    threads: int = 0
    files: int = 0

    def __add__(self, other: Made) -> Made:
        return self._each(other, 1)

    def __sub__(self, other: Made) -> Made:
        return self._each(other, -1)

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def describe(self) -> str:
        """For people: what is not 0."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in counts.items() if n)

    def _each(self, other: Made, sign: int) -> Made:
        names = [field.name for field in fields(self)]
        return Made(**{n: getattr(self, n) + sign * getattr(other, n) for n in names})


def host_made() -> Made:
    """Threads and files that this process has now; 0 where the system does not tell."""
    return Made(threads=_entries(_THREADS), files=_entries(_FILES))


def _entries(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0
