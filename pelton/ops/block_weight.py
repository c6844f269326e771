"""A weight that stays in quantised blocks of GGUF's, packed for the kernels of blocks.c."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pelton.device.native.forms import FORMS
from pelton.device.native.library import MAX_RUNS, BlockArgs, BlockRun, loaded
from pelton.device.native.memory import weight_memory

LANES = 16
"""Features of a panel."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of one form."""

    form: str
    num_rows: int


class BlockWeight:
    """[N, K] numbers, of which each 16 or 32 neighbours in a row share a scale.

    runs: of its rows, in order; all but the last a multiple of 16 long. K: a multiple of the forms'
    blocks (32, or 256 for the K types). Rows are given by `pack`; those that are not are zeros.
    """

    def __init__(self, num_columns: int, runs: Sequence[Run]) -> None:
        assert 0 < len(runs) <= MAX_RUNS
        assert all(run.num_rows % LANES == 0 for run in runs[:-1])
        self.shape = sum(run.num_rows for run in runs), num_columns
        self.runs = tuple(runs)
        panel_bytes = loaded().functions.pelton_panel_bytes
        sizes = [
            -(-run.num_rows // LANES) * panel_bytes(FORMS.index(run.form), num_columns)
            for run in runs
        ]
        self._parts = torch.split(weight_memory(sum(sizes)), sizes)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def pack(self, first_row: int, blocks: torch.Tensor) -> None:
        """blocks: uint8 [n, bytes], rows first_row.. as they lie in the file; all of one run."""
        start = number = 0
        while first_row >= start + self.runs[number].num_rows:
            start += self.runs[number].num_rows
            number += 1
        run, part = self.runs[number], self._parts[number]
        assert first_row + len(blocks) <= start + run.num_rows, "rows of two runs"
        blocks = blocks.contiguous()
        loaded().functions.pelton_pack_blocks(
            FORMS.index(run.form),
            blocks.data_ptr(),
            len(blocks),
            self.shape[1],
            first_row - start,
            part.data_ptr(),
        )

    def arguments(self) -> BlockArgs:
        """Of a kernel, as far as the weight goes. They point into its memory."""
        args = BlockArgs(num_runs=len(self.runs))
        for place, (run, part) in enumerate(zip(self.runs, self._parts, strict=True)):
            num_panels = -(-run.num_rows // LANES)
            args.runs[place] = BlockRun(part.data_ptr(), num_panels, FORMS.index(run.form))
        args.linear.num_features, args.linear.num_columns = self.shape
        return args
