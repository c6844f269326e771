"""Host memory on its way to the device: three ways, of which a live probe picks one.

    aliased    kernels read pinned host memory in place: no copy
    pinned     one asynchronous copy from pinned memory
    pageable   one copy from plain memory, which may keep the host waiting

Nobody outside this room learns which one it is. Platforms are not told by their names: some give
plain memory to who asks for pinned memory, and some a view that is a copy of its first content:
so what is promised is tried.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pelton.device.late_copies import LateCopies
from pelton.device.protocol import StagingBlock
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError

StagingMode = Literal["aliased", "pinned", "pageable"]

_PROBED_WORDS = 1024


class HostAccess(Protocol):
    """What a device offers, and its staging memory is built of."""

    name: str

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that stays where it is. Raises RuntimeError where there is none."""
        ...

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        """`host`, made by `pinned`, for the device to see. Raises RuntimeError where it cannot."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def launch(self, kernel: Callable[..., object], *args: Any) -> None: ...

    def copy_to_device(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def synchronize(self) -> None: ...


class AliasedBlock:
    """Read in place."""

    def __init__(self, device: HostAccess, num_words: int) -> None:
        host = device.pinned((num_words,), torch.int32)
        self.words: npt.NDArray[np.int32] = host.numpy()
        self._seen = device.alias(host)

    def publish(self, num_words: int) -> torch.Tensor:
        return self._seen[:num_words]


class CopiedBlock:
    """Copied into memory of the device's own. host: [num_words] int32."""

    def __init__(self, device: HostAccess, host: torch.Tensor) -> None:
        self._device = device
        self._host = host
        self.words: npt.NDArray[np.int32] = host.numpy()
        self._copy = device.empty((len(host),), torch.int32)

    def publish(self, num_words: int) -> torch.Tensor:
        copy = self._copy[:num_words]
        # A prefix: what indexing would gather is pageable again.
        self._device.copy_to_device(copy, self._host[:num_words])
        return copy


class HostMemory:
    """A device's way to the host's memory.

    Args:
        asked: "auto", or a mode that is used or refused.
        cold_bytes: tables of that many bytes which steps seldom read lie in host memory where the
            device reads it in place; None: never.

    mode, reason: what was chosen and why. device_bytes: tables that lie on the device although they
    are that large; host_bytes: those that do not.

    Raises ConfigError for a mode that does not work here.
    """

    def __init__(self, device: HostAccess, asked: str, cold_bytes: int | None) -> None:
        self._device = device
        self._cold_bytes = cold_bytes
        self.mode: StagingMode
        self.mode, self.reason = probe(device)
        self._tables: dict[str, int] = {}
        if asked == "auto":
            return
        if STAGING_MODES.index(asked) < STAGING_MODES.index(self.mode):
            raise ConfigError(
                f"staging_mode={asked!r} does not work on {device.name}: {self.reason}. "
                f"Use 'auto', which is {self.mode!r} here."
            )
        self.mode = asked  # type: ignore[assignment]
        self.reason = "asked for"

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory for copies to and from the device."""
        if self.mode == "pageable":
            return torch.zeros(shape, dtype=dtype)
        return self._device.pinned(shape, dtype)

    def block(self, num_words: int) -> StagingBlock:
        if self.mode == "aliased":
            return AliasedBlock(self._device, num_words)
        return CopiedBlock(self._device, self.buffer((num_words,), torch.int32))

    def table(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory that kernels read and write, and steps seldom read."""
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._cold_bytes is None or num_bytes < self._cold_bytes:
            return self._device.zeros(shape, dtype)
        self._tables[name] = num_bytes
        if self.mode == "aliased":
            return self._device.alias(self._device.pinned(shape, dtype))
        return self._device.zeros(shape, dtype)

    @property
    def device_bytes(self) -> int:
        return 0 if self.mode == "aliased" else sum(self._tables.values())

    @property
    def host_bytes(self) -> int:
        return sum(self._tables.values()) if self.mode == "aliased" else 0

    def describe(self) -> str:
        """One line for the log of a start."""
        line = f"Staging memory of {self._device.name}: {self.mode} ({self.reason})"
        if self.host_bytes:
            line += f"; {self.host_bytes} bytes of large tables lie in host memory"
        if self.device_bytes or not self.host_bytes:
            line += f"; {self.device_bytes} bytes of large tables lie in device memory"
        return line + "."


class UsesHostMemory(ABC):
    """The verbs of a Device that its `host_memory` answers. late_copies: of `deliver`, which events
    land."""

    host_memory: HostMemory
    late_copies: LateCopies

    @abstractmethod
    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def deliver(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.host_memory.mode == "pageable":
            self.late_copies.add(target, source)
        else:
            self.copy_to_host(target, source)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.host_memory.buffer(shape, dtype)

    def staging_block(self, num_words: int) -> StagingBlock:
        return self.host_memory.block(num_words)

    def cold_table(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.host_memory.table(name, shape, dtype)

    def describe_staging(self) -> str:
        return self.host_memory.describe()


def probe(device: HostAccess) -> tuple[StagingMode, str]:
    """The best way that works, and what was found. Whatever is odd counts against it."""
    try:
        host = device.pinned((_PROBED_WORDS,), torch.int32)
        seen = device.pinned((_PROBED_WORDS,), torch.int32)
    except RuntimeError as error:
        return "pageable", f"no pinned memory: {_first_line(error)}"
    try:
        alias = device.alias(host)
        problem = _why_no_alias(device, host, alias, seen)
    except (RuntimeError, TypeError, ValueError) as error:
        problem = _first_line(error)
    if problem is None:
        return "aliased", "kernels read what the host wrote, twice, and the host what they wrote"
    return "pinned", f"kernels cannot read host memory in place: {problem}"


def _why_no_alias(
    device: HostAccess, host: torch.Tensor, alias: torch.Tensor, seen: torch.Tensor
) -> str | None:
    """host, seen: [n] int32 host memory."""
    copy = device.empty((len(host),), torch.int32)
    words = np.arange(len(host), dtype=np.int32)
    for turn in (1, 2):
        host.numpy()[:] = words * turn
        device.launch(_add_one, alias, copy)
        device.copy_to_host(seen, copy)
        device.synchronize()
        if not np.array_equal(seen.numpy(), words * turn + 1):
            return f"write {turn} of the host was not seen by a kernel"
    device.launch(_add_one, copy, alias)
    device.synchronize()
    if not np.array_equal(host.numpy(), words * 2 + 2):
        return "a kernel's write was not seen by the host"
    return None


def _add_one(source: torch.Tensor, out: torch.Tensor) -> None:
    """A kernel of torch's, so that it is no copy engine that reads."""
    torch.add(source, 1, out=out)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
