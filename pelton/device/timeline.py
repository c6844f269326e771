"""When each launch of a device began and ended, for those who ask what a step is made of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Span(NamedTuple):
    """begin, seconds: of time.perf_counter, or of the device's own clock."""

    name: str
    begin: float
    seconds: float


class Timeline:
    """Spans in order. What consists of calls that have spans has none itself: between these there
    is only what Python does."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def run(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Returns work(*args)."""
        before = len(self.spans)
        begin = time.perf_counter()
        result = work(*args)
        end = time.perf_counter()
        if len(self.spans) == before:
            self.spans.append(Span(name, begin, end - begin))
        return result


class _State(threading.local):
    timeline: Timeline | None = None


_state = _State()


def current() -> Timeline | None:
    """What this thread's launches are written into."""
    return _state.timeline


@contextlib.contextmanager
def timing() -> Iterator[Timeline]:
    """Launches of this thread on an inline device are written down."""
    before, _state.timeline = _state.timeline, Timeline()
    try:
        yield _state.timeline
    finally:
        _state.timeline = before


def name_of(kernel: Callable[..., object]) -> str:
    """As its source calls it."""
    name = getattr(kernel, "__qualname__", None) or type(kernel).__qualname__
    return f"{getattr(kernel, '__module__', '')}.{name}".removeprefix("pelton.")
