"""Logits processors that end the engine that runs them, each in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch.distributed

from pelton.engine.loop import EngineLoop
from pelton.errors import DeviceLost
from pelton.worker.worker import Worker


def _fail(self: Worker, plan: Any) -> Any:
    raise ZeroDivisionError("on purpose")


TARGET = "support.sabotage:sabotage"


def sabotage(scores: Any, row: Any, *, how: str) -> None:
    """how: "exception", "device", "kill", "segfault", "exit", "sleep:SECONDS", or "child:FILE",
    which starts a process that would live on, and writes its pid into the file. "N:" before it:
    only on that rank of several workers, where "exception" fails the next step of that rank."""
    if how[0].isdigit():
        rank, _, how = how.partition(":")
        if torch.distributed.get_rank() != int(rank):
            return
        if how == "exception":
            Worker.execute = _fail  # type: ignore[method-assign]
            return
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "exit":
        os._exit(3)
    elif how.startswith("child:"):
        file = Path(how.removeprefix("child:"))
        if not file.exists():
            file.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    elif how.startswith("sleep:"):
        time.sleep(float(how.removeprefix("sleep:")))
    else:
        # An exception in here would end one request only; the next step shall fail as a whole.
        def step(self: EngineLoop) -> Any:
            if how == "device":
                raise DeviceLost("the device is gone")
            raise ZeroDivisionError("on purpose")

        EngineLoop.step = step  # type: ignore[method-assign]
