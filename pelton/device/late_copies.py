"""Results on their way to memory that is not pinned.

A copy to such memory keeps the host waiting until all before it has run, so steps would no longer
be launched ahead. What the host is to read is kept on the device instead, and copied when somebody
has waited for an event behind it: beside the queue, which then has the next step in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch


class SideCopies(Protocol):
    """What a device offers for it."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def launch(self, kernel: Callable[..., object], *args: Any) -> None: ...

    def copy_beside(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target[...] = source, at once and whatever the queue holds; target is host memory."""
        ...


class LateCopies:
    """Copies to the host in the order in which they were asked for. num_added: so far."""

    def __init__(self, device: SideCopies) -> None:
        self._device = device
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.num_added = 0
        self._num_landed = 0

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        kept = self._device.empty(tuple(source.shape), source.dtype)
        self._device.launch(torch.Tensor.copy_, kept, source)
        self._waiting.append((target, kept))
        self.num_added += 1

    def land(self, num_added: int) -> None:
        """Those of the first `num_added` that have not yet. All work queued before the last one of
        them has run."""
        if self._num_landed >= num_added:
            return
        # Whoever waits may be outside of the mode that the buffers were made in.
        with torch.inference_mode():
            while self._num_landed < num_added:
                self._num_landed += 1
                self._device.copy_beside(*self._waiting.popleft())
