"""Weights of GGUF files stay in their blocks, repacked once (device/native/blocks.c)."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.device.native.forms import FORMS
from pelton.device.native.library import MAX_RUNS
from pelton.ops.block_weight import LANES, BlockWeight, Run
from pelton.quant.scheme import StoredRows


class GGUFBlocks:
    """Takes Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K, and several of them in one weight if
    each begins at a multiple of 16 rows. Other types (F16, Q2_K, IQ4_NL ...) are dequantised, and
    with them all of the weight that they are part of."""

    def allocate(self, num_columns: int, stored: Sequence[StoredRows]) -> BlockWeight | None:
        runs: list[Run] = []
        for rows in stored:
            if rows.form not in FORMS or rows.first_row % LANES:
                return None
            if runs and runs[-1].form == rows.form:
                runs[-1] = Run(rows.form, runs[-1].num_rows + rows.num_rows)
            else:
                runs.append(Run(rows.form, rows.num_rows))
        return BlockWeight(num_columns, runs) if 0 < len(runs) <= MAX_RUNS else None
