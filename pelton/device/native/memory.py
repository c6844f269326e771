"""Memory that kernels stream, in huge pages where there are any: weights one behind the other, and
keys and values.

A step reads all weights once. With pages of 4 KB each of them costs a walk through the tables of
pages (two, nested, in a virtual machine), which took a tenth to a sixth of a step.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

_HUGE_PAGE = 2 * 1024 * 1024
_CHUNK_BYTES = 16 * _HUGE_PAGE
_LINE_BYTES = 64


class _Chunks:
    """Hands out pieces of large mappings, each of which lives as long as any of its pieces, the
    last one until the next is made. What nobody writes to takes no memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        padded = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        with self._lock:
            if len(self._left) < padded:
                self._left = large_memory(max(_CHUNK_BYTES, padded))
            piece, self._left = self._left[:num_bytes], self._left[padded:]
        return piece


_chunks = _Chunks()


def weight_memory(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros, at a multiple of 64 bytes: where a line begins decides how many
    cache lines it touches."""
    return _chunks.take(num_bytes)


def large_memory(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of zeros, a mapping of its own that begins at a huge page. What nobody
    writes to takes no memory."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # another system, or a kernel without
        memory.madvise(mmap.MADV_HUGEPAGE)
    # Pieces outlive whoever came first, who may have been in inference mode.
    with torch.inference_mode(False):
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]
