"""Logits processors that end the engine that runs them, each in its own way."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from pelton.engine.loop import EngineLoop
from pelton.errors import DeviceLost

TARGET = "support.sabotage:sabotage"


def sabotage(scores: Any, row: Any, *, how: str) -> None:
    """how: "exception", "device", "kill", "segfault", "exit", or "sleep:SECONDS"."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "exit":
        os._exit(3)
    elif how.startswith("sleep:"):
        time.sleep(float(how.removeprefix("sleep:")))
    else:
        # An exception in here would end one request only; the next step shall fail as a whole.
        def step(self: EngineLoop) -> Any:
            if how == "device":
                raise DeviceLost("the device is gone")
            raise ZeroDivisionError("on purpose")

        EngineLoop.step = step  # type: ignore[method-assign]
