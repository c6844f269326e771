"""How the host tells the device something: one packed block per changed step, and one launch.

Host truth never lives in memory that the device reads. What is new in a step, parts of its small
arrays (the header) and staged writes, is packed into the block of the next ring slot, which is free
again when the fence that was recorded after the step's last reader has passed. One kernel scatters
the block to fixed device addresses, from which all others read. Whether the block is copied before,
or read in place, is the device's matter.

    ring slot k (host)                                   device
    [ targets | cu_lens | words ]  -> staged_write ->    arena  [ tables | header ]      fixed
    [ targets | cu_lens | words ]  -> staged_write ->    a cold table of its own         fixed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pelton.device.protocol import Device, Event, StagingBlock
from pelton.errors import ConfigError, IntegrityError
from pelton.ops.step_kernels import step_kernel

_POISON = -7
# 64 KiB: the arrivals of a usual step.
_LEAST_WORDS = 2**14
# A second of small steps at least, many more of large ones.
_IDLE_LEASES = 1024
_WORDS = {torch.int32: 1, torch.float32: 1, torch.int64: 2}
_NUMPY = {torch.int32: np.int32, torch.float32: np.float32, torch.int64: np.int64}


class _Write(NamedTuple):
    """words to store[target : target + len(words)]."""

    store: int
    target: int
    words: npt.NDArray[np.int32]


class StagedTensor:
    """Rows on the device that the host changes by sparse writes. `tensor`: [num_rows, width]."""

    def __init__(
        self,
        staging: Staging,
        name: str,
        store: int,
        offset: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._staging = staging
        self._store = store
        self._offset = offset
        self._words_per_row = shape[1] * _WORDS[dtype]
        self._numpy_dtype = np.dtype(_NUMPY[dtype])

    @property
    def tensor(self) -> torch.Tensor:
        """[num_rows, width], at an address that never changes."""
        return self._staging.view(self._store, self._offset, self.shape, self.dtype)

    def stage(self, row: int, start: int, values: npt.ArrayLike) -> None:
        """Write `values` to [row, start : start + len(values)] before the next step's kernels.

        Raises IntegrityError where that leaves the row, or where an integer table cannot hold it.
        """
        if isinstance(values, np.ndarray) and values.dtype == self._numpy_dtype:
            array = np.ascontiguousarray(values)
        else:
            given = np.asarray(values)
            array = np.ascontiguousarray(given, dtype=self._numpy_dtype)
            if array.dtype.kind == "i" and array.dtype != given.dtype and np.any(array != given):
                raise IntegrityError(f"{self.name} is {self.dtype} and cannot hold {given}")
        if start < 0 or start + len(array) > self.shape[1] or not 0 <= row < self.shape[0]:
            raise IntegrityError(
                f"staged write to {self.name}[{row}, {start}:{start + len(array)}] leaves "
                f"{self.shape}"
            )
        if len(array):
            target = self._offset + row * self._words_per_row + start * _WORDS[self.dtype]
            self._staging.add_write(self._store, target, array.view(np.int32))


class HeaderSection:
    """A small int32 array that is new in every step."""

    def __init__(self, staging: Staging, name: str, offset: int, length: int) -> None:
        self.name = name
        self._staging = staging
        self._range = slice(offset, offset + length)

    @property
    def tensor(self) -> torch.Tensor:
        """[length] int32, at an address that never changes."""
        return self._staging.header_tensor[self._range]

    def values(self, step: StagedStep) -> npt.NDArray[np.int32]:
        """The host array of this step, to be filled before the step is flushed."""
        return step.header[self._range]


@dataclass(slots=True)
class StagingStats:
    """Counts since the start. num_waits: slots that were asked for before the device had read them.
    host_bytes, peak_host_bytes: of the ring."""

    num_steps: int = 0
    num_publishes: int = 0
    num_words: int = 0
    num_waits: int = 0
    host_bytes: int = 0
    peak_host_bytes: int = 0

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"Staging: {self.num_publishes} publishes of {4 * self.num_words} bytes in "
            f"{self.num_steps} steps, {self.num_waits} waits for a slot, "
            f"at most {self.peak_host_bytes} bytes of host memory."
        )


class StagedStep:
    """One ring slot, leased to one step until `release`."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.header: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._block: StagingBlock | None = None
        self._fence: Event | None = None
        self._is_published = False
        self._num_words = 0  # the most that one of the last leases took
        self._num_small = 0  # leases in a row that took a small part of the block
        self.is_leased = False

    def lease(self) -> None:
        staging = self._staging
        if self._fence is not None and not self._fence.is_done():
            staging.stats.num_waits += 1
            self._fence.wait()
        self.is_leased = True
        self._is_published = False
        if len(self.header) != staging.header_len:
            self.header = np.zeros(staging.header_len, np.int32)
        if staging.device.poisons:
            self.header.fill(_POISON)
            if self._block is not None:
                self._block.words.fill(_POISON)
        self._shrink()

    def publish(self, arrays: list[npt.NDArray[np.int32]]) -> torch.Tensor:
        """[n] for kernels: the arrays back to back.

        Raises IntegrityError after the step's first time, and after its release: kernels that may
        not have run yet read the block.
        """
        if not self.is_leased:
            raise IntegrityError("a staging slot was published after its step had given it back")
        if self._is_published:
            raise IntegrityError("a step publishes its staging slot once")
        self._is_published = True
        size = sum(map(len, arrays))
        if self._block is None or size > len(self._block.words):
            # The fence has passed, so nobody reads the old block any more.
            self._replace(max(size, self._staging.least_words))
        assert self._block is not None
        self._num_words = max(self._num_words, size)
        np.concatenate(arrays, out=self._block.words[:size])
        self._staging.stats.num_publishes += 1
        self._staging.stats.num_words += size
        return self._block.publish(size)

    def release(self) -> None:
        """The step's last reader has been launched: the slot is free once it has run."""
        self._fence = self._staging.device.record_event()
        self.is_leased = False

    def _shrink(self) -> None:
        """One long prompt shall not keep its pinned memory for ever."""
        if self._block is None:
            return
        capacity = len(self._block.words)
        if capacity <= self._staging.least_words or self._num_words > capacity // 4:
            self._num_small = self._num_words = 0
            return
        self._num_small += 1
        if self._num_small == _IDLE_LEASES:
            self._replace(max(self._num_words, self._staging.least_words))

    def _replace(self, num_words: int) -> None:
        """A block of the next power of two of words. Only between the fence and `publish`."""
        staging, old = self._staging, self._block
        self._block = staging.device.staging_block(1 << (num_words - 1).bit_length())
        self._num_small = self._num_words = 0
        stats = staging.stats
        stats.host_bytes += self._block.words.nbytes - (0 if old is None else old.words.nbytes)
        stats.peak_host_bytes = max(stats.peak_host_bytes, stats.host_bytes)


class Staging:
    """Everything staged, on one device.

    Declare tensors and sections first, then `allocate`. Per step: `begin`, fill sections and stage
    writes, `flush` once, launch kernels, and `release` the returned step after the last of them.

    Args:
        depth: steps in flight at once; the ring has one slot more.
        least_words: of a slot's block; it grows with what is staged, and shrinks again.
    """

    def __init__(self, device: Device, depth: int, least_words: int = _LEAST_WORDS) -> None:
        self.device = device
        self.least_words = least_words
        self.stats = StagingStats()
        self._write = step_kernel("staged_write", device.torch_device.type)
        self.header_len = 0
        self._arena_words = 0
        self._header_start = 0
        # [words] each: the arena, and every cold table.
        self._stores: list[torch.Tensor] = []
        self._cold: list[tuple[str, int]] = []
        self._sent_header: npt.NDArray[np.int32] | None = None
        self._writes: list[_Write] = []
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._ring = [StagedStep(self) for _ in range(depth + 1)]
        self._next = 0

    def tensor(
        self, name: str, num_rows: int, width: int, dtype: torch.dtype, *, is_cold: bool = False
    ) -> StagedTensor:
        """Declare a [num_rows, width] device tensor of zeros; int32, float32 or int64.

        is_cold: few steps read much of it, so that it may lie in slower memory if it is large.
        """
        assert not self._stores, "declare staged tensors before allocate()"
        if is_cold:
            self._cold.append((name, num_rows * width * _WORDS[dtype]))
            return StagedTensor(self, name, len(self._cold), 0, (num_rows, width), dtype)
        self._arena_words += self._arena_words % 2  # int64 rows start on 8 bytes
        staged = StagedTensor(self, name, 0, self._arena_words, (num_rows, width), dtype)
        self._arena_words += num_rows * width * _WORDS[dtype]
        return staged

    def section(self, name: str, length: int) -> HeaderSection:
        """Declare an int32 header section."""
        assert not self._stores, "declare sections before allocate()"
        section = HeaderSection(self, name, self.header_len, length)
        self.header_len += length
        return section

    def allocate(self) -> None:
        """Give every declared tensor and section its address.

        Raises ConfigError when the tables have more than 2**31 words.
        """
        self._header_start = -(-self._arena_words // 4) * 4  # on 16 bytes
        num_words = self._header_start + self.header_len
        for size in (num_words, *(size for _, size in self._cold)):
            if size >= 2**31:
                raise ConfigError(
                    f"the tables of max_num_seqs x max_model_len need {size} words, more than "
                    f"{2**31 - 1}: lower max_num_seqs or max_model_len."
                )
        self._stores = [
            self.device.zeros((num_words,), torch.int32),
            *(self.device.cold_table(name, (size,), torch.int32) for name, size in self._cold),
        ]

    @property
    def header_tensor(self) -> torch.Tensor:
        assert self._stores, "allocate() first"
        return self._stores[0][self._header_start :]

    def view(
        self, store: int, offset: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """[*shape] of a store from word `offset` on."""
        key = (store, offset, dtype)
        if key not in self._views:
            assert self._stores, "allocate() first"
            words = self._stores[store][offset : offset + shape[0] * shape[1] * _WORDS[dtype]]
            self._views[key] = words.view(dtype).view(shape)
        return self._views[key]

    def add_write(self, store: int, target: int, words: npt.NDArray[np.int32]) -> None:
        self._writes.append(_Write(store, target, words))

    def drop_writes(self, mark: int) -> None:
        """Forget the writes staged since `num_writes` was `mark`."""
        del self._writes[mark:]

    @property
    def num_writes(self) -> int:
        return len(self._writes)

    def begin(self) -> StagedStep:
        """Lease the next ring slot; waits only when `depth` steps are already in flight.

        Raises IntegrityError while the step before holds its slot: a step turns the ring once, or
        the ring would hold half as many.
        """
        if self._ring[self._next - 1].is_leased:
            raise IntegrityError("a staging slot was asked for while a step still holds its own")
        step = self._ring[self._next]
        step.lease()
        self._next = (self._next + 1) % len(self._ring)
        self.stats.num_steps += 1
        return step

    def flush(self, step: StagedStep, *, is_whole: bool = False) -> None:
        """Launch what differs from the device's header, and the staged writes: nothing where there
        is nothing. is_whole: the whole header, since the device may not have the last one."""
        if is_whole:
            self._sent_header = None
        changed = self._changed_header(step.header)
        if changed is not None:
            self.add_write(0, self._header_start + changed.start, step.header[changed])
        self.flush_writes(step)
        if changed is not None:
            self._sent_header = step.header.copy()

    def flush_writes(self, step: StagedStep) -> None:
        """Launch the staged writes alone, for a step without rows."""
        if not self._writes:
            return
        assert self._stores, "allocate() first"
        arrays: list[npt.NDArray[np.int32]] = []
        launches: list[tuple[torch.Tensor, int, int]] = []  # store, writes, words of its part
        for index, store in enumerate(self._stores):
            mine = [write for write in self._writes if write.store == index]
            if not mine:
                continue
            targets = np.array([write.target for write in mine], np.int32)
            cu_lens = np.zeros(len(mine) + 1, np.int32)
            np.cumsum([len(write.words) for write in mine], out=cu_lens[1:])
            if self.device.poisons:
                _refuse_overlap(targets, np.diff(cu_lens))
            arrays += [targets, cu_lens, *(write.words for write in mine)]
            launches.append((store, len(mine), 2 * len(mine) + 1 + int(cu_lens[-1])))
        published = step.publish(arrays)
        start = 0
        for store, num_writes, num_words in launches:
            part = published if len(launches) == 1 else published[start : start + num_words]
            self.device.launch(self._write, store, part, num_writes)
            start += num_words
        self._writes = []

    def _changed_header(self, header: npt.NDArray[np.int32]) -> slice | None:
        """From the first to the last word that the device does not have."""
        if self._sent_header is None:
            return slice(0, len(header)) if len(header) else None
        differs = self._sent_header != header
        if not differs.any():
            return None
        return slice(int(differs.argmax()), len(header) - int(differs[::-1].argmax()))


def _refuse_overlap(targets: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
    """Two writes to one word in one flush would be unordered on a real device."""
    order = np.argsort(targets)
    ends = (targets + lengths)[order]
    if np.any(ends[:-1] > targets[order][1:]):
        raise IntegrityError("two staged writes of one step overlap")
