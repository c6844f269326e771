"""Some verification rows on their way through the stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pelton.batch.staged import StagedTensor
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import PROMPT_LEN, RowTensors
from pelton.sampling.processors import Processor
from pelton.sampling.row_lists import NO_LISTS, ListSizes
from pelton.sampling.rows import Need, SamplingRows


@dataclass(frozen=True, slots=True)
class Span:
    """Verification rows start:stop, and the work that at least one of them needs.

    num_candidates: the largest top_k. num_stop_ids: the longest list of end tokens. lists: sizes of
    the longest others. history_len: no row that asks for its history has more tokens.
    processors: (row of the span, its functions) for rows that have any.
    """

    start: int
    stop: int
    needs: Need
    num_candidates: int
    num_stop_ids: int
    lists: ListSizes = NO_LISTS
    history_len: int = 0
    processors: tuple[tuple[int, tuple[Processor, ...]], ...] = ()


@dataclass(slots=True)
class Tile:
    """Stages read the tile's parameters and replace or change `scores`.

    rows, state, slots [n] int64, positions [n] int32: see `Sampler`.
    pool: [P] int32, where the lists of `rows` stand.
    scores: [n, C] float32, the stage's input; token_ids: [n, C] int32, or None while C = V and
        column = token id.
    out_ids [n] int32, out_max [n] float32: what the last stage writes; the drawn token, and the
        largest score (with noise).
    failed_rows: rows of the tile whose requests a stage ends.
    """

    span: Span
    rows: SamplingRows
    state: RowTensors
    pool: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor
    token_ids: torch.Tensor | None
    out_ids: torch.Tensor
    out_max: torch.Tensor
    failed_rows: list[int] = field(default_factory=list)

    def param(self, table: StagedTensor) -> torch.Tensor:
        """[n] of a [num_rows, 1] table."""
        return table.tensor[:, 0].index_select(0, self.slots)

    def table(self, table: StagedTensor) -> torch.Tensor:
        """[n, width] of a [num_rows, width] table."""
        return table.tensor.index_select(0, self.slots)

    def words(self, column: int, width: int) -> torch.Tensor:
        """[n, width] int32: the lists whose places stand in `column`, padded with -1."""
        start, length = self.table(self.rows.lists.places)[:, column : column + 2].unbind(1)
        place = torch.arange(width, dtype=torch.int32, device=start.device)
        is_listed = place < length[:, None]
        words = self.pool[torch.where(is_listed, start[:, None] + place, 0).long()]
        return torch.where(is_listed, words, -1)

    def prompt_len(self) -> torch.Tensor:
        """[n] int32."""
        return self.state.fields[:, PROMPT_LEN].index_select(0, self.slots)

    def tokens_at(self, index: torch.Tensor) -> torch.Tensor:
        """[n, W] int32, the tokens at [n, W] places of the rows' requests; see ops/row_tokens."""
        out = torch.empty(index.shape, dtype=torch.int32, device=index.device)
        row_tokens = step_kernel("row_tokens", index.device.type)
        row_tokens(self.state.fields, self.state.tokens, self.slots, index, out)
        return out

    def history(self) -> torch.Tensor:
        """[n, history_len] int32: the rows' requests from their first tokens on. What lies behind a
        row's own position is not to be used."""
        place = torch.arange(self.span.history_len, dtype=torch.int32, device=self.slots.device)
        return self.tokens_at(place.expand(len(self.slots), -1))
