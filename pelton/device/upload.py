"""Weights on their way into parameters."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

_BUFFER_BYTES = 32 * 2**20
# One thread copies memory at about 10 GB/s, and the way to a GPU takes 50.
_NUM_THREADS = 8


class Upload(Protocol):
    """Copies host tensors into parameters, which may be somewhere else."""

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target[...] = source, converted; done at the latest when `finish` returns. The source
        stays unchanged until then."""
        ...

    def finish(self) -> None:
        """Wait for everything, and raise what went wrong."""
        ...


class DirectUpload:
    """At once, in this thread: for parameters in host memory."""

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def finish(self) -> None:
        return None


class _Buffer:
    """Pinned memory, and the stream that its copies go through."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class PinnedUpload:
    """Through pinned buffers and several threads: pages of a file are read and converted while
    others travel. What lies on the GPU already is copied there.

    Close with `finish`, whatever happens.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="upload")
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        self._buffers: list[_Buffer] = []
        self._jobs: list[Future[None]] = []

    def put(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type != "cpu":
            target.copy_(source)
            return
        if target.numel() == 0 or target.dim() == 0 or not target.is_contiguous():
            target.copy_(source)
            return
        row_bytes = max(target[0].nbytes, 1)
        if row_bytes > _BUFFER_BYTES:
            for one, values in zip(target, source, strict=True):
                self.put(one, values)
            return
        step = _BUFFER_BYTES // row_bytes
        for first in range(0, len(target), step):
            rows = slice(first, first + step)
            buffer = self._buffer()
            self._jobs.append(
                self._threads.submit(_copy, buffer, target[rows], source[rows], self._free)
            )

    def finish(self) -> None:
        self._threads.shutdown()
        for job in self._jobs:
            job.result()
        for buffer in self._buffers:
            buffer.stream.synchronize()

    def _buffer(self) -> _Buffer:
        """A free one: the host is never more than the buffers ahead."""
        if len(self._buffers) < 2 * _NUM_THREADS and self._free.empty():
            self._buffers.append(_Buffer(self._device))
            return self._buffers[-1]
        return self._free.get()


def _copy(
    buffer: _Buffer, target: torch.Tensor, source: torch.Tensor, free: SimpleQueue[_Buffer]
) -> None:
    """In a thread."""
    try:
        with torch.inference_mode(), torch.cuda.stream(buffer.stream):
            buffer.stream.synchronize()  # its last copy
            staged = buffer.memory[: target.nbytes].view(target.dtype).view(target.shape)
            if source.dtype == target.dtype and source.is_contiguous():
                # torch would set more threads on it, and each of these would.
                staged_np = buffer.memory[: target.nbytes].numpy()
                np.copyto(staged_np, source.reshape(-1).view(torch.uint8).numpy())
            else:
                staged.copy_(source)
            target.copy_(staged, non_blocking=True)
    finally:
        free.put(buffer)


def upload_to(device: torch.device) -> Upload:
    """The way into parameters on `device`."""
    return PinnedUpload(device) if device.type == "cuda" else DirectUpload()
