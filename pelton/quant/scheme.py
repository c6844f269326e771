"""What a quantisation scheme decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pelton.ops.block_weight import BlockWeight


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows first_row.. of a weight, and the type of the blocks that the file holds them in, None
    for plain numbers."""

    first_row: int
    num_rows: int
    form: str | None


class Scheme(Protocol):
    def allocate(self, num_columns: int, stored: Sequence[StoredRows]) -> BlockWeight | None:
        """Memory for a weight [sum of rows, num_columns] that stays as it is stored; None: it
        becomes numbers of the model's dtype. stored: all of it, in the order of rows."""
        ...
