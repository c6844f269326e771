"""What a device can do. Everything that the engine asks of hardware goes through these verbs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pelton.device.made import Made


class Event(Protocol):
    """A point in the device's queue."""

    def is_done(self) -> bool:
        """Whether all work queued before the event has ended; never waits."""
        ...

    def wait(self) -> None:
        """Block the host until it has."""
        ...


class Recording(Protocol):
    """Launches that were recorded once, at fixed addresses and with fixed arguments."""

    def replay(self) -> None:
        """Queue them again, in their order."""
        ...


class StagingBlock(Protocol):
    """Host memory whose contents kernels get to see.

    words: [capacity] int32, the host's to write. The device may read them at any time from
    `publish` until an event recorded after the last kernel that was given its result has passed:
    until then they stay unchanged, and the block is kept.
    """

    words: npt.NDArray[np.int32]

    def publish(self, num_words: int) -> torch.Tensor:
        """[num_words] int32 for kernels that are launched from now on: the first words as they
        are."""
        ...


class Device(Protocol):
    """One device with one in-order queue.

    Device memory is only touched by launched kernels and by the two copies. Host memory handed to
    `copy_to_device` may be read by the device at any time until an event recorded after the copy
    has passed: who owns it keeps it unchanged until then.
    """

    name: str
    torch_device: torch.device
    runs_inline: bool
    """Whether a launch has ended when `launch` returns: steps are then collected before the next
    one is launched, since launching ahead could only delay their tokens."""
    poisons: bool
    """Whether memory that nobody may read any more is overwritten, to make violations loud."""

    records_when_asked: bool
    """Whether `record` may be called in the midst of work: it runs nothing and costs little."""
    made_in_recordings: Made
    """What was made beside launches by all that was recorded so far; nothing, of a device whose
    recordings are its launches' arguments and no more."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed device memory."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Device memory of any content."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device copies from or to without staging it again."""
        ...

    def staging_block(self, num_words: int) -> StagingBlock:
        """Host memory for what the host writes step by step and kernels read once."""
        ...

    def cold_table(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory that kernels read and write, but seldom: a large one may lie in the host's
        memory, so nothing but kernels may touch it."""
        ...

    def describe_staging(self) -> str:
        """How staging blocks and cold tables lie here, and why: a line for people."""
        ...

    def attach(self) -> None:
        """From now on the calling thread's work goes to this device's queue. The thread that made
        the device is attached."""
        ...

    def launch(self, kernel: Callable[..., object], *args: Any) -> None:
        """Queue `kernel(*args)`. The kernel writes into tensors given to it and returns nothing."""
        ...

    def record(self, run: Callable[[], object]) -> Recording:
        """Call `run` once and keep its launches instead of queueing them.

        `run` launches, and does nothing else to the device. Memory that it asks for is the
        recording's, and may be that of other recordings of this device: they run one after the
        other. Every number that a launch is given is fixed; what differs from replay to replay
        must lie in device memory, which CPU kernels may read.
        """
        ...

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue target[...] = source; source is host memory."""
        ...

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue target[...] = source; target is host memory. Where it is not pinned the host may be
        kept waiting for all that is queued before."""
        ...

    def deliver(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`copy_to_host` for results: nobody but the host reads `target`, once `wait` of an event
        recorded after this has returned, or `synchronize`. Never keeps the host waiting."""
        ...

    def record_event(self) -> Event:
        """An event after everything queued so far."""
        ...

    def compiling(self) -> AbstractContextManager[object]:
        """Around the building of layers: the kernels that they ask for are compiled side by side,
        and are there at the end: that of the outermost one, where several are nested."""
        ...

    def rehearsing(self) -> AbstractContextManager[object]:
        """Around launches on padding alone: where kernels are compiled on demand, those that would
        be launched are compiled side by side, and not run."""
        ...

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""
        ...


class MeasuredDevice(Device, Protocol):
    """A device that tells how much of its memory is in use."""

    def memory(self) -> tuple[int, int]:
        """(bytes in use by anybody, bytes there are)."""
        ...

    def release_cached(self) -> None:
        """Give back what was freed and kept for the next request."""
        ...
