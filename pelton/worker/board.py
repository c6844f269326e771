"""Where each rank stands, for whoever asks why a step does not end: memory that all may read.

of each rank: beat (seconds of the host's monotonic clock), step, length of the text, the text
"""

from __future__ import annotations

import mmap
import os
import threading
import time

import numpy as np

_TEXT = 232
_BEAT_SECONDS = 0.25
_DTYPE = np.dtype([("beat", "<f8"), ("step", "<i8"), ("length", "<i8"), ("text", "u1", _TEXT)])


def make_board(num_ranks: int) -> int:
    """A descriptor of its memory."""
    memory = os.memfd_create("pelton-board")
    os.ftruncate(memory, num_ranks * _DTYPE.itemsize)
    return memory


class Board:
    def __init__(self, memory: int, num_ranks: int) -> None:
        self._map = mmap.mmap(memory, num_ranks * _DTYPE.itemsize)
        self._ranks = np.frombuffer(self._map, _DTYPE)

    def writer(self, rank: int) -> BoardWriter:
        return BoardWriter(self._ranks[rank : rank + 1])

    def silence(self, rank: int) -> float:
        """Seconds since the rank's last beat; 0 before its first."""
        beat = float(self._ranks["beat"][rank])
        return max(time.monotonic() - beat, 0.0) if beat else 0.0

    def describe(self, rank: int) -> str:
        entry = self._ranks[rank]
        text = bytes(entry["text"][: min(int(entry["length"]), _TEXT)]).decode(errors="replace")
        return f"rank {rank}: step {int(entry['step'])}, {text or 'not begun'}"


class BoardWriter:
    """One rank's entry."""

    def __init__(self, entry: np.ndarray) -> None:
        self._entry = entry
        self._text = entry["text"][0]

    def start_beating(self) -> None:
        """In a thread: it beats while the rank waits for others, but not when it is stopped."""
        self._entry["beat"][0] = time.monotonic()
        threading.Thread(target=self._beat, name="pelton-beat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self._entry["beat"][0] = time.monotonic()
            time.sleep(_BEAT_SECONDS)

    def begin_step(self, step: int) -> None:
        self._entry["step"][0] = step

    def note(self, text: str) -> None:
        data = text.encode()[:_TEXT]
        self._text[: len(data)] = np.frombuffer(data, np.uint8)
        self._entry["length"][0] = len(data)
