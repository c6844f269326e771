"""The CPU: launches run inline, so every event has passed by the time it exists."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pelton.device.made import Made
from pelton.device.native.library import library
from pelton.device.native.memory import large_memory
from pelton.device.native.tape import NativeTape
from pelton.device.staging import HostMemory, UsesHostMemory
from pelton.device.tape import Recorder
from pelton.device.timeline import current, name_of


class PassedEvent:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


_PASSED = PassedEvent()
_LARGE_BYTES = 2 * 1024 * 1024


class CPUDevice(UsesHostMemory):
    name = "cpu"
    torch_device = torch.device("cpu")
    runs_inline = True
    poisons = False
    records_when_asked = True
    made_in_recordings = Made()

    def __init__(self, num_threads: int | None = None, staging_mode: str = "auto") -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._recorder = Recorder()
        kernels = library()
        if kernels is not None:
            kernels.set_num_threads(torch.get_num_threads())
        self.host_memory = HostMemory(self, staging_mode, cold_bytes=None)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _LARGE_BYTES:
            return torch.empty(shape, dtype=dtype)
        return large_memory(num_bytes).view(dtype).view(shape)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def attach(self) -> None:
        return None

    def launch(self, kernel: Callable[..., object], *args: Any) -> None:
        if self._recorder.launches is not None:
            self._recorder.launches.append((kernel, args))
            return
        timeline = current()
        if timeline is None:
            kernel(*args)
        else:
            timeline.run(name_of(kernel), kernel, *args)

    def record(self, run: Callable[[], object]) -> NativeTape:
        return NativeTape(self._recorder.record(run), library())

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._recorder.launches is None, "a copy of host memory in a recording"
        target.copy_(source)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._recorder.launches is None, "a copy of host memory in a recording"
        target.copy_(source)

    def deliver(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copy_to_host(target, source)

    def record_event(self) -> PassedEvent:
        return _PASSED

    def compiling(self) -> AbstractContextManager[object]:
        return nullcontext()

    def rehearsing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        return None
