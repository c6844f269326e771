"""Embeddings that stand in a prompt where token ids would. No torch.

    position     0    1    2    3    4    5
    prompt      17   row  row   8   row   9       a mix: two token ids and three rows in between
    token_ids   17   -1   -2    8   -3    9       -1 - k stands for row k

So whoever looks for tokens finds none there, no two of these are equal, and where a row of a
request stands needs no mask beside the ids.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

STORED_AS: dict[str, type[np.generic]] = {
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
}
"""What holds elements of a dtype; numpy has no bfloat16, so its bits are kept."""

_DIGEST_SIZE = 32


class PromptEmbeds:
    """rows: [n, H], n >= 1, contiguous, elements as STORED_AS says; nobody writes to them again.

    dtype: of the elements.
    """

    def __init__(self, rows: npt.NDArray[Any], dtype: str) -> None:
        assert rows.ndim == 2
        assert rows.dtype == STORED_AS[dtype]
        self.rows = np.ascontiguousarray(rows)
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        return int(self.rows.shape[1])

    @cached_property
    def digests(self) -> bytes:
        """SHA-256 of each row, one after the other. Of rows and not of blocks or of all of them, so
        that prompts share whatever blocks they have in common."""
        return b"".join(hashlib.sha256(row).digest() for row in self.rows)

    def digest(self, ids: npt.NDArray[np.int32]) -> bytes:
        """Of the rows that stand among `ids`, a part of a prompt; b"" if there are none."""
        first, count = rows_among(ids)
        return self.digests[first * _DIGEST_SIZE : (first + count) * _DIGEST_SIZE]


def placeholders(is_row: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """[T] int32: what stands for the rows at those places, in order; 0 elsewhere."""
    return (np.cumsum(is_row) * -is_row.astype(np.int32)).astype(np.int32)


def rows_among(ids: npt.NDArray[np.int32]) -> tuple[int, int]:
    """(first row, number of rows) that stand among `ids`, a part of a prompt."""
    found = ids[ids < 0]
    return (-1 - int(found[0]), len(found)) if len(found) else (0, 0)


def end_of_rows(ids: npt.NDArray[np.int32]) -> int:
    """The position after the last row's; 0 without rows."""
    places = np.flatnonzero(ids < 0)
    return int(places[-1]) + 1 if len(places) else 0
