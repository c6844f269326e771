"""How the host tells the device something: packed buffers and at most two copies per step.

Host truth never lives in memory that the device reads. A step's small arrays (the header) and its
staged writes are packed into the next buffers of a ring; they are free again when the fence that
was recorded after the step's last reader has passed. Kernels read fixed device addresses: the
header's sections and the arena. Only the staged-write kernel reads the write region, which may
move when it grows.

    ring slot k (host)                       device
    header  [ idx_mapping | query_start… ] -> header  [ idx_mapping | query_start… ]   fixed
    writes  [ targets | cu_lens | words  ] -> writes  -> staged_write -> arena         fixed
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pelton.device.protocol import Device, Event
from pelton.errors import ConfigError, IntegrityError
from pelton.ops.step_kernels import step_kernel

_POISON = -7
_WORDS = {torch.int32: 1, torch.float32: 1, torch.int64: 2}
_NUMPY = {torch.int32: np.int32, torch.float32: np.float32, torch.int64: np.int64}


class StagedTensor:
    """Rows on the device that the host changes by sparse writes. `tensor`: [num_rows, width]."""

    def __init__(
        self, staging: Staging, name: str, offset: int, shape: tuple[int, int], dtype: torch.dtype
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._staging = staging
        self._offset = offset
        self._words_per_row = shape[1] * _WORDS[dtype]
        self._numpy_dtype = np.dtype(_NUMPY[dtype])

    @property
    def tensor(self) -> torch.Tensor:
        """[num_rows, width], at an address that never changes."""
        return self._staging.view(self._offset, self.shape, self.dtype)

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
            self._staging.add_write(target, array.view(np.int32))


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


class StagedStep:
    """One ring slot, leased to one step until `release`."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._header_tensor = staging.device.host_buffer((0,), torch.int32)
        self._writes_tensor = staging.device.host_buffer((0,), torch.int32)
        self.header: npt.NDArray[np.int32] = self._header_tensor.numpy()
        self._writes: npt.NDArray[np.int32] = self._writes_tensor.numpy()
        self._fence: Event | None = None
        self.is_leased = False

    def lease(self) -> None:
        if self.is_leased:
            raise IntegrityError("a staging slot was asked for while a step still holds it")
        if self._fence is not None:
            self._fence.wait()
        self.is_leased = True
        if len(self.header) != self._staging.header_len:
            self._header_tensor = self._staging.device.host_buffer(
                (self._staging.header_len,), torch.int32
            )
            self.header = self._header_tensor.numpy()
        if self._staging.device.poisons:
            self.header.fill(_POISON)
            self._writes.fill(_POISON)

    def pack_writes(self, arrays: list[npt.NDArray[np.int32]]) -> torch.Tensor:
        """[n] host memory holding the arrays back to back."""
        size = sum(map(len, arrays))
        if size > len(self._writes):
            capacity = 1 << (size - 1).bit_length()
            self._writes_tensor = self._staging.device.host_buffer((capacity,), torch.int32)
            self._writes = self._writes_tensor.numpy()
        np.concatenate(arrays, out=self._writes[:size])
        return self._writes_tensor[:size]

    def header_source(self) -> torch.Tensor:
        return self._header_tensor

    def release(self) -> None:
        """The step's last reader has been launched: the slot is free once it has run."""
        self._fence = self._staging.device.record_event()
        self.is_leased = False


class Staging:
    """Everything staged, on one device.

    Declare tensors and sections first, then `allocate`. Per step: `begin`, fill sections and stage
    writes, `flush` once, launch kernels, and `release` the returned step after the last of them.

    Args:
        depth: steps in flight at once; the ring has one slot more.
    """

    def __init__(self, device: Device, depth: int) -> None:
        self.device = device
        self._write = step_kernel("staged_write", device.torch_device.type)
        self.header_len = 0
        self._arena_words = 0
        self._arena: torch.Tensor | None = None
        self._header: torch.Tensor | None = None
        self._device_writes = device.empty((0,), torch.int32)
        self._sent_header: npt.NDArray[np.int32] | None = None
        self._targets: list[int] = []
        self._contents: list[npt.NDArray[np.int32]] = []
        self._views: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._ring = [StagedStep(self) for _ in range(depth + 1)]
        self._next = 0

    def tensor(self, name: str, num_rows: int, width: int, dtype: torch.dtype) -> StagedTensor:
        """Declare a [num_rows, width] device tensor of zeros; int32, float32 or int64."""
        assert self._arena is None, "declare staged tensors before allocate()"
        self._arena_words += self._arena_words % 2  # int64 rows start on 8 bytes
        staged = StagedTensor(self, name, self._arena_words, (num_rows, width), dtype)
        self._arena_words += num_rows * width * _WORDS[dtype]
        return staged

    def section(self, name: str, length: int) -> HeaderSection:
        """Declare an int32 header section."""
        assert self._header is None, "declare sections before allocate()"
        section = HeaderSection(self, name, self.header_len, length)
        self.header_len += length
        return section

    def allocate(self) -> None:
        """Give every declared tensor and section its address.

        Raises ConfigError when the tables have more than 2**31 words.
        """
        if self._arena_words >= 2**31:
            raise ConfigError(
                f"the tables of max_num_seqs x max_model_len need {self._arena_words} words, more "
                f"than {2**31 - 1}: lower max_num_seqs or max_model_len."
            )
        self._arena = self.device.zeros((self._arena_words,), torch.int32)
        self._header = self.device.zeros((self.header_len,), torch.int32)

    @property
    def header_tensor(self) -> torch.Tensor:
        assert self._header is not None, "allocate() first"
        return self._header

    def view(self, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """[*shape] of the arena from word `offset` on."""
        key = (offset, dtype)
        if key not in self._views:
            assert self._arena is not None, "allocate() first"
            words = self._arena[offset : offset + shape[0] * shape[1] * _WORDS[dtype]]
            self._views[key] = words.view(dtype).view(shape)
        return self._views[key]

    def add_write(self, target: int, words: npt.NDArray[np.int32]) -> None:
        self._targets.append(target)
        self._contents.append(words)

    def drop_writes(self, mark: int) -> None:
        """Forget the writes staged since `num_writes` was `mark`."""
        del self._targets[mark:]
        del self._contents[mark:]

    @property
    def num_writes(self) -> int:
        return len(self._targets)

    def begin(self) -> StagedStep:
        """Lease the next ring slot; waits only when `depth` steps are already in flight."""
        step = self._ring[self._next]
        step.lease()
        self._next = (self._next + 1) % len(self._ring)
        return step

    def flush(self, step: StagedStep) -> None:
        """Launch the copies and the staged-write kernel: a header equal to the one on the device
        and an empty list of writes cost nothing."""
        if self._sent_header is None or not np.array_equal(self._sent_header, step.header):
            self.device.copy_to_device(self.header_tensor, step.header_source())
            self._sent_header = step.header.copy()
        self.flush_writes(step)

    def flush_writes(self, step: StagedStep) -> None:
        """Launch the staged writes alone, for a step without rows."""
        if not self._targets:
            return
        lengths = np.array([len(words) for words in self._contents], np.int32)
        targets = np.array(self._targets, np.int32)
        if self.device.poisons:
            _refuse_overlap(targets, lengths)
        cu_lens = np.zeros(len(targets) + 1, np.int32)
        np.cumsum(lengths, out=cu_lens[1:])
        source = step.pack_writes([targets, cu_lens, *self._contents])
        if len(source) > len(self._device_writes):
            capacity = 1 << (len(source) - 1).bit_length()
            self._device_writes = self.device.empty((capacity,), torch.int32)
        writes = self._device_writes[: len(source)]
        self.device.copy_to_device(writes, source)
        assert self._arena is not None
        self.device.launch(self._write, self._arena, writes, len(targets))
        self._targets = []
        self._contents = []


def _refuse_overlap(targets: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]) -> None:
    """Two writes to one word in one flush would be unordered on a real device."""
    order = np.argsort(targets)
    ends = (targets + lengths)[order]
    if np.any(ends[:-1] > targets[order][1:]):
        raise IntegrityError("two staged writes of one step overlap")
