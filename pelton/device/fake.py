"""A device for tests that is as late as a device may be.

Launches and copies wait in a queue until somebody waits for an event behind them, so host memory
that is rewritten too early, or read too early, shows as wrong tokens every time instead of once in
a million steps. Its tensors raise on any host read, and on any work outside a launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from pelton.device.late_copies import LateCopies
from pelton.device.made import Made
from pelton.device.staging import HostMemory, UsesHostMemory
from pelton.device.tape import Recorder, Tape

# What the host may do with a device tensor outside a launch: ask for its shape and make views.
_VIEWS = frozenset(
    """__getitem__ __len__ __get__ as_strided chunk detach dim element_size expand flatten
    is_contiguous narrow ndimension nelement numel permute reshape select size slice split squeeze
    storage_offset stride swapaxes t transpose unbind unflatten unsqueeze view view_as
    is_floating_point data_ptr __hash__ is_complex __repr__""".split()
)


class HostReadError(AssertionError):
    """The host touched device memory outside a launch."""


class FakeDeviceTensor(torch.Tensor):
    """Device memory of the fake device."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "__repr__":
            return "FakeDeviceTensor(on the device)"
        if name not in _VIEWS:
            raise HostReadError(f"host code called {name} on a device tensor outside a launch")
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        # `reshape` may copy, and indexing with a list or an array does: that is work, and a read.
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and _memory(item) != _memory(args[0]):
                raise HostReadError(f"host code copied a device tensor by {name} outside a launch")
        return result


def _memory(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


class FakeEvent:
    def __init__(self, device: FakeDevice, position: int) -> None:
        self._device = device
        self._position = position
        self._num_late = device.late_copies.num_added

    def is_done(self) -> bool:
        return self._device.num_done >= self._position

    def wait(self) -> None:
        self._device.run_until(self._position)
        self._device.late_copies.land(self._num_late)


class FakeDevice(UsesHostMemory):
    """Queued launches, delayed copies. `num_done` counts queue entries that have run.

    staging_mode: as in EngineArgs. cold_bytes: see HostMemory.
    """

    name = "fake"
    torch_device = torch.device("cpu")
    runs_inline = False
    poisons = True
    records_when_asked = True
    made_in_recordings = Made()

    def __init__(self, staging_mode: str = "auto", cold_bytes: int | None = None) -> None:
        self._queue: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._recorder = Recorder()
        self.late_copies = LateCopies(self)
        self._waits_for_copies = False
        self._reset_counts()
        self.host_memory = HostMemory(self, staging_mode, cold_bytes)
        # As a driver does where the host's memory is not pinned.
        self._waits_for_copies = self.host_memory.mode == "pageable"
        self._reset_counts()  # the probe's own

    def _reset_counts(self) -> None:
        self.num_done = 0
        self.num_copies_to_device = 0
        self.num_launches = 0
        self.max_queued = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).as_subclass(FakeDeviceTensor)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            poison = torch.full(shape, float("nan"), dtype=dtype)
        else:
            poison = torch.full(shape, -7, dtype=torch.int64).to(dtype)
        return poison.as_subclass(FakeDeviceTensor)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host.as_subclass(FakeDeviceTensor)

    def attach(self) -> None:
        return None

    def launch(self, kernel: Callable[..., object], *args: Any) -> None:
        if self._recorder.launches is not None:
            self._recorder.launches.append((kernel, args))
            return
        self._queue.append((kernel, args))
        self.num_launches += 1
        self.max_queued = max(self.max_queued, len(self._queue))

    def record(self, run: Callable[[], object]) -> Tape:
        return Tape(self._recorder.record(run), self.launch)

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._recorder.launches is None, "a copy of host memory in a recording"
        self.num_copies_to_device += 1
        self.launch(torch.Tensor.copy_, target, source)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._recorder.launches is None, "a copy of host memory in a recording"
        self.launch(torch.Tensor.copy_, target, source)
        if self._waits_for_copies:
            self.run_until(self.num_done + len(self._queue))

    def deliver(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._recorder.launches is None, "a copy to host memory in a recording"
        super().deliver(target, source)

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See LateCopies."""
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(source)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, self.num_done + len(self._queue))

    def compiling(self) -> AbstractContextManager[object]:
        return nullcontext()

    def rehearsing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        self.run_until(self.num_done + len(self._queue))
        self.late_copies.land(self.late_copies.num_added)

    def run_until(self, position: int) -> None:
        """Run queue entries until `position` of them have ended since the device was made."""
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode():
            while self.num_done < position:
                kernel, args = self._queue.popleft()
                self.num_done += 1
                kernel(*args)
