"""No quantisation: weights are numbers of the model's dtype, whatever the file holds."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.quant.scheme import StoredRows


class Dense:
    def allocate(self, num_columns: int, stored: Sequence[StoredRows]) -> None:
        return None
