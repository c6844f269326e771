"""Recording the ladder of shapes, once everything is warm."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from pelton.device.protocol import Device
from pelton.forward.executor import Executor
from pelton.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """num_recorded: recordings that were made, in so many seconds."""

    num_recorded: int
    seconds: float


def record_all(device: Device, runner: ModelRunner, executor: Executor) -> CaptureReport:
    """Record every shape of the ladder, large ones first: the memory that they need serves the
    small ones.

    Each is launched once before, on padding alone, so that its kernels are compiled and loaded and
    libraries have their workspaces.
    """
    started = time.perf_counter()
    keys = executor.unrecorded()[::-1]
    if keys:
        runner.rest()
        for shape, is_sampled in keys:
            executor.warm(shape, is_sampled)
        device.synchronize()
        was_enabled = gc.isenabled()
        gc.disable()  # what it would free in the midst of a capture may belong to the device
        try:
            for shape, is_sampled in keys:
                executor.record(shape, is_sampled)
        finally:
            if was_enabled:
                gc.enable()
    return CaptureReport(num_recorded=len(keys), seconds=time.perf_counter() - started)
