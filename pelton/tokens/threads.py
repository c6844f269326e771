"""Threads that read texts: they step back where processors are short."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

_NICE = 10
"""About a tenth of a processor's time, beside a thread that wants all of it."""


def step_back() -> None:
    """Lower the calling thread's priority, for good: long texts are read in such threads, so that
    the event loop and the engine's steps go first. Linux alone has priorities of threads."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
