"""Preempted requests' KV in host memory: the copies that a plan asks for.

A page holds what one block holds in every pool. All copies go through the device's one queue:
those to the host after the steps that may still write the blocks and before this step writes to
any, those back before the step's forward pass. No host code ever looks into a page, so nothing here
waits, and a page's next copy comes after its last one by itself.

    pools   --pack-->   device buffer   --copy-->   pages        (saved)
    pools  <-unpack--   device buffer  <--copy--    pages        (restored)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.batch.staged import Staging
from pelton.core.plan import NO_COPIES, Int32Array, NewRow, PageCopies, StepPlan
from pelton.device.protocol import Device
from pelton.ops.pack_blocks import pack_blocks, unpack_blocks

# The device buffer between a pool and its pages; a quarter of a common last-level cache.
_BUFFER_BYTES = 8 * 2**20
_TIMED_PAGES = 64


@dataclass(frozen=True, slots=True)
class _Store:
    """A pool, the host memory for its part of every page, and the buffer between them."""

    pool: torch.Tensor  # [num_blocks, ...]
    pages: torch.Tensor  # [num_pages, ...], host memory
    buffer: torch.Tensor  # [n, ...]; pools of one layout share it


class KVOffload(StepParticipant):
    """Moves blocks out to host pages and back. Comes before whoever writes to new blocks.

    Args:
        num_pages: 0 where nothing is ever moved; then no memory is taken.
    """

    def __init__(self, device: Device, staging: Staging, num_pages: int) -> None:
        self._device = device
        self._num_pages = num_pages
        # A step may save to every page, and restore from every page.
        self._list = staging.tensor("moved_blocks", 1, 2 * num_pages, torch.int32)
        self._stores: list[_Store] = []
        self._saves = NO_COPIES
        self._restores: list[PageCopies] = []
        self._num_moved = 0

    def allocate(self, pools: Sequence[torch.Tensor]) -> None:
        """Host memory for `num_pages` pages. pools: [num_blocks, ...] each, some perhaps twice."""
        if not self._num_pages:
            return
        buffers: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}
        for pool in {id(pool): pool for pool in pools}.values():
            shape, dtype = tuple(pool.shape[1:]), pool.dtype
            if (shape, dtype) not in buffers:
                num_bytes = math.prod(shape) * dtype.itemsize
                size = min(max(_BUFFER_BYTES // num_bytes, 1), self._num_pages)
                buffers[shape, dtype] = self._device.empty((size, *shape), dtype)
            pages = self._device.host_buffer((self._num_pages, *shape), dtype)
            if self._device.poisons:
                pages.fill_(math.nan if dtype.is_floating_point else 77)
            self._stores.append(_Store(pool, pages, buffers[shape, dtype]))

    def begin_step(self, plan: StepPlan) -> None:
        self._saves = plan.offloads
        self._restores = []

    def add_request(self, row: NewRow) -> None:
        if len(row.restores):
            self._restores.append(row.restores)

    def apply_writes(self) -> None:
        """The blocks that are saved, and behind them those that are restored."""
        moved = [self._saves.block_ids, *(copies.block_ids for copies in self._restores)]
        self._num_moved = sum(map(len, moved))
        if self._num_moved:
            self._list.stage(0, 0, np.concatenate(moved))

    def before_forward(self, batch: InputBatch) -> None:
        if not self._num_moved:
            return
        num_saved = len(self._saves)
        block_ids = self._list.tensor[0, : self._num_moved]
        self._save(block_ids[:num_saved], self._saves.page_ids)
        if self._restores:
            page_ids = np.concatenate([copies.page_ids for copies in self._restores])
            self._restore(block_ids[num_saved:], page_ids)

    def _save(self, block_ids: torch.Tensor, page_ids: Int32Array) -> None:
        """block_ids: [n] int32 on the device."""
        for store in self._stores:
            for first, last in _pieces(len(page_ids), len(store.buffer)):
                packed = store.buffer[: last - first]
                self._device.launch(pack_blocks, store.pool, block_ids[first:last], packed)
                for page, start, end in _runs(page_ids[first:last]):
                    pages = store.pages[page : page + end - start]
                    self._device.copy_to_host(pages, packed[start:end])

    def _restore(self, block_ids: torch.Tensor, page_ids: Int32Array) -> None:
        for store in self._stores:
            for first, last in _pieces(len(page_ids), len(store.buffer)):
                packed = store.buffer[: last - first]
                for page, start, end in _runs(page_ids[first:last]):
                    pages = store.pages[page : page + end - start]
                    self._device.copy_to_device(packed[start:end], pages)
                self._device.launch(unpack_blocks, store.pool, block_ids[first:last], packed)

    def measure(self) -> tuple[float, float]:
        """Seconds that a page costs out and in again, and what two copies cost beside their pages.

        Copies the null block, which stays what it is, before the first request. The least of three
        runs each: the first one also pays for fresh memory.
        """
        most = min(_TIMED_PAGES, self._num_pages)
        one, many = (min(self._timed(count) for _ in range(3)) for count in (1, most))
        per_page = max(many - one, 0.0) / (most - 1) if most > 1 else one
        return per_page, max(one - per_page, 0.0)

    def _timed(self, num_pages: int) -> float:
        nulls = self._device.zeros((num_pages,), torch.int32)
        page_ids = np.arange(num_pages, dtype=np.int32)
        self._device.synchronize()
        started = time.perf_counter()
        self._save(nulls, page_ids)
        self._restore(nulls, page_ids)
        self._device.synchronize()
        return time.perf_counter() - started


def _pieces(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most `size` that cover `length`."""
    for first in range(0, length, size):
        yield first, min(first + size, length)


def _runs(page_ids: Int32Array) -> Iterator[tuple[int, int, int]]:
    """(page, start, end): page_ids[start:end] are page, page + 1, ..."""
    breaks = np.flatnonzero(np.diff(page_ids) != 1) + 1
    bounds = [0, *breaks.tolist(), len(page_ids)]
    for start, end in pairwise(bounds):
        if start < end:
            yield int(page_ids[start]), start, end
