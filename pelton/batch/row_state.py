"""Persistent state of requests: one fixed row each, on the device."""

from __future__ import annotations

import numpy as np
import torch

from pelton.batch.staged import Staging
from pelton.core.plan import NewRow, StepPlan
from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN, RowTensors

RESERVED_ROWS = 1


class RowState:
    """Token table and counters of max_num_seqs rows, and one row more for synthetic steps.

    The device holds the truth of everything that depends on sampled tokens; the host keeps only
    `prefill_len_np` [R], which it decided itself.
    """

    def __init__(
        self, staging: Staging, *, max_num_seqs: int, max_model_len: int, num_drafts: int
    ) -> None:
        self.num_rows = num_rows = max_num_seqs + RESERVED_ROWS
        self.reserved_slot = max_num_seqs
        self.num_drafts = num_drafts
        self.prefill_len_np = np.zeros(num_rows, np.int32)
        self._fields = staging.tensor(
            "row_fields", num_rows, NEXT_TOKENS + 1 + num_drafts, torch.int32
        )
        self._tokens = staging.tensor(
            "row_tokens", num_rows, max_model_len, torch.int32, is_cold=True
        )

    def add(self, row: NewRow) -> None:
        """Stage all of a row's state, whatever its former owner left there."""
        slot = row.ref.slot
        self.prefill_len_np[slot] = row.prefill_len
        self._fields.stage(
            slot,
            0,
            [
                row.prompt_len,
                row.prefill_len,
                row.prefill_len,
                row.num_computed_tokens,
                int(row.token_ids[-1]),
                *[-1] * self.num_drafts,
            ],
        )
        self._tokens.stage(slot, 0, row.token_ids)

    def learn(self, plan: StepPlan) -> None:
        """Stage what rows have got since their last step, where another stage samples."""
        if plan.known_tokens is None:
            return
        for row in np.flatnonzero(plan.known_tokens >= 0).tolist():
            slot, token = plan.refs[row].slot, plan.known_tokens[row : row + 1]
            at = int(plan.num_computed_bound[row])
            self._fields.stage(slot, TOTAL_LEN, [at + 1])
            self._fields.stage(slot, NEXT_TOKENS, token)
            self._tokens.stage(slot, at, token)

    def tensors(
        self,
        block_tables: tuple[torch.Tensor, ...],
        block_sizes: tuple[int, ...],
        windows: tuple[int | None, ...],
    ) -> RowTensors:
        return RowTensors(
            self._fields.tensor, self._tokens.tensor, block_tables, block_sizes, windows
        )
