"""Messages from one process to others of its host, through memory that they share.

    words: 0 = bytes written so far; 1 + r = bytes that reader r has read so far
    then the bytes themselves, the last `capacity` of them: each message is its length and its text

A message goes to all readers, in order, and may be larger than the ring: it is written as there is
room. Who waits sleeps on a descriptor (eventfd), one for each reader.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pelton.errors import ConfigError

_LENGTH = 8  # bytes
_ROOM_SECONDS = 0.0005  # between looks for room


@dataclass(frozen=True, slots=True)
class RingHandle:
    """What another process needs to map a ring; its descriptors are inherited by number."""

    memory: int
    capacity: int
    bells: tuple[int, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.memory, *self.bells)


def make_ring(num_readers: int, capacity: int = 4 * 2**20) -> RingHandle:
    """capacity: bytes. Raises ConfigError where the system has no such memory."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd"):
        raise ConfigError(
            "Several workers need memory that processes share by descriptor, which this system has "
            "not (Linux has it); use tensor_parallel_size=1 and pipeline_parallel_size=1."
        )
    memory = os.memfd_create("pelton-ring")
    os.ftruncate(memory, _header_bytes(num_readers) + capacity)
    bells = tuple(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_readers))
    return RingHandle(memory, capacity, bells)


def _header_bytes(num_readers: int) -> int:
    return 64 * -(-8 * (1 + num_readers) // 64)


class _Ring:
    def __init__(self, handle: RingHandle) -> None:
        self._handle = handle
        self._capacity = handle.capacity
        num_readers = len(handle.bells)
        size = _header_bytes(num_readers) + handle.capacity
        self._map = mmap.mmap(handle.memory, size)
        self._counts = np.frombuffer(self._map, np.int64, 1 + num_readers)
        self._bytes = np.frombuffer(self._map, np.uint8, offset=_header_bytes(num_readers))

    def _pieces(self, position: int, count: int) -> list[tuple[int, int]]:
        """Where bytes position : position + count lie: one run, or two around the end."""
        first = position % self._capacity
        before = min(count, self._capacity - first)
        return [(first, before)] + ([(0, count - before)] if count > before else [])


class RingWriter(_Ring):
    """check: called while the slowest reader leaves no room; raises to give up."""

    def __init__(self, handle: RingHandle, check: Callable[[], object] = lambda: None) -> None:
        super().__init__(handle)
        self._check = check

    def write(self, message: bytes) -> None:
        self._put(len(message).to_bytes(_LENGTH, "little"))
        self._put(message)

    def _put(self, data: bytes) -> None:
        source = np.frombuffer(data, np.uint8)
        done = 0
        while done < len(source):
            written = int(self._counts[0])
            room = self._capacity - (written - int(self._counts[1:].min()))
            if not room:
                self._check()
                time.sleep(_ROOM_SECONDS)
                continue
            count = min(room, len(source) - done)
            for at, length in self._pieces(written, count):
                self._bytes[at : at + length] = source[done : done + length]
                done += length
            self._counts[0] = written + count
            for bell in self._handle.bells:
                os.eventfd_write(bell, 1)


class RingReader(_Ring):
    """The reader `index`. One thread at a time."""

    def __init__(self, handle: RingHandle, index: int) -> None:
        super().__init__(handle)
        self._bell = handle.bells[index]
        self._mine = self._counts[1 + index : 2 + index]
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)

    def has_message(self) -> bool:
        """Whether at least the beginning of one is there."""
        return bool(self._counts[0] > self._mine[0])

    def read(self, check: Callable[[], object] = lambda: None) -> bytes:
        """The next message; waits for it. check: called at every look; raises to give up."""
        length = int.from_bytes(self._take(_LENGTH, check), "little")
        return self._take(length, check)

    def ring_bell(self) -> None:
        """Wake who waits in `read`, to look at `check`."""
        os.eventfd_write(self._bell, 1)

    def _take(self, count: int, check: Callable[[], object]) -> bytes:
        out = np.empty(count, np.uint8)
        done = 0
        while done < count:
            check()
            position = int(self._mine[0])
            there = int(self._counts[0]) - position
            if not there:
                self._poll.poll()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                continue
            length = min(there, count - done)
            for at, run in self._pieces(position, length):
                out[done : done + run] = self._bytes[at : at + run]
                done += run
            self._mine[0] = position + length
        return out.tobytes()
