"""Some verification rows on their way through the stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pelton.batch.staged import StagedTensor
from pelton.sampling.rows import Need, SamplingRows


@dataclass(frozen=True, slots=True)
class Span:
    """Verification rows start:stop, and the work that at least one of them needs.

    num_candidates: the largest top_k. num_stop_ids: the longest list of end tokens.
    """

    start: int
    stop: int
    needs: Need
    num_candidates: int
    num_stop_ids: int


@dataclass(slots=True)
class Tile:
    """Stages read the tile's parameters and replace or change `scores`.

    rows, slots [n] int64, positions [n] int32: see `Sampler.run`.
    scores: [n, C] float32, the stage's input; token_ids: [n, C] int32, or None while C = V and
        column = token id.
    out_ids [n] int32, out_max [n] float32: what the last stage writes; the drawn token, and the
        largest score (with noise).
    """

    span: Span
    rows: SamplingRows
    slots: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor
    token_ids: torch.Tensor | None
    out_ids: torch.Tensor
    out_max: torch.Tensor

    def param(self, table: StagedTensor) -> torch.Tensor:
        """[n] of a [num_rows, 1] table."""
        return table.tensor[:, 0].index_select(0, self.slots)
