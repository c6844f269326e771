"""The one way into a C kernel: called at once, or written down by whoever records a step.

A kernel of this library is `int function(const arguments *)`, 0 unless memory is short, and reads
everything that changes from step to step through the pointers in its arguments. So a call is an
address and a structure, and a step's calls can be made again without Python (tape.c).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from pelton.device.timeline import current


class CallRecorder(Protocol):
    def add_call(self, function: Any, args: ctypes.Structure, kept: object) -> None:
        """function: of the loaded library. args: a copy of the caller's. kept: what `args` points
        to and nobody else may hold."""
        ...


class _State(threading.local):
    recorder: CallRecorder | None = None


_state = _State()


def call(function: Callable[..., int], args: ctypes.Structure, kept: object = None) -> None:
    """Run `function` on `args`, or record it. Raises MemoryError when the kernel says so."""
    recorder = _state.recorder
    if recorder is not None:
        recorder.add_call(function, type(args).from_buffer_copy(args), kept)
        return
    timeline = current()
    if timeline is None:
        failed = function(ctypes.byref(args))
    else:
        failed = timeline.run(function.__name__, function, ctypes.byref(args))
    if failed:
        raise MemoryError(f"no memory for the work of {function.__name__}")


@contextlib.contextmanager
def recording(recorder: CallRecorder) -> Iterator[None]:
    """Calls of this thread go to `recorder` and are not made."""
    before, _state.recorder = _state.recorder, recorder
    try:
        yield
    finally:
        _state.recorder = before
