"""Lists of any length on the device, for the few requests that have any."""

from __future__ import annotations

import numpy as np
import torch

from pelton.core.plan import Int32Array
from pelton.device.protocol import Device

_SMALLEST = 16


class ListPool:
    """Lists of int32 words in one tensor that starts empty and doubles when it is full.

    A place has a power of two of words; one that was given back is given out again. Copies and
    growth are queued in order, so launched steps still read what they were launched with: but they
    must be given `tensor` as it was then, since a later list may move all of them to another one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[int, list[int]] = {}
        self._end = 0
        self.tensor = device.zeros((0,), torch.int32)

    def add(self, words: Int32Array) -> int:
        """Queue the copy of [n >= 1] words to the device; returns the index of the first."""
        size = _place_size(len(words))
        free = self._free.get(size)
        start = free.pop() if free else self._append(size)
        source = self._device.host_buffer((len(words),), torch.int32)
        source.numpy()[:] = words
        self._device.copy_to_device(self.tensor[start : start + len(words)], source)
        return start

    def remove(self, start: int, num_words: int) -> None:
        """Give a list's place back; no step that is launched from now on may read it."""
        self._free.setdefault(_place_size(num_words), []).append(start)

    def _append(self, size: int) -> int:
        start, end = self._end, self._end + size
        if end > len(self.tensor):
            grown = self._device.zeros((max(end, 2 * len(self.tensor)),), torch.int32)
            if start:
                self._device.launch(torch.Tensor.copy_, grown[:start], self.tensor[:start])
            self.tensor = grown
        self._end = end
        return start


def _place_size(num_words: int) -> int:
    return max(_SMALLEST, 1 << (num_words - 1).bit_length())


def float_words(values: list[float]) -> Int32Array:
    """float32 values as words."""
    return np.array(values, np.float32).view(np.int32)
