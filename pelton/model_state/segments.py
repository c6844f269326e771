"""Which of a text's two parts a token is of: a question and an answer that a model compares."""

from __future__ import annotations

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.batch.staged import Staging
from pelton.core.plan import NewRow
from pelton.device.protocol import Device


class Segments(StepParticipant):
    """Per row where its second part begins, on the device and in a mirror: the length of its
    prompt, where it has none.

    Args:
        num_rows: slots, the reserved one included. max_tokens: of a step.
    """

    def __init__(self, device: Device, staging: Staging, *, num_rows: int, max_tokens: int) -> None:
        self._device = device
        self._starts = staging.tensor("second_segment", num_rows, 1, torch.int32)
        self._has_two_np = np.zeros(num_rows, np.bool_)
        self._types = device.zeros((max_tokens,), torch.int64)

    def add_request(self, row: NewRow) -> None:
        slot, start = row.ref.slot, row.second_segment
        self._has_two_np[slot] = start is not None
        value = row.prompt_len if start is None else start
        self._starts.stage(slot, 0, np.array([value], np.int32))

    def token_types(self, batch: InputBatch) -> torch.Tensor | None:
        """[T] int64, 0 or 1, filled when the step runs; None if all are 0."""
        if not self._has_two_np[batch.slots_np].any():
            return None
        types = self._types[: batch.descriptor.num_tokens]
        self._device.launch(self._fill, batch, types)
        return types

    def _fill(self, batch: InputBatch, types: torch.Tensor) -> None:
        step, num_live = batch.step, batch.num_tokens
        starts = self._starts.tensor[:, 0].index_select(0, step.idx_mapping)
        # Padding rows have no tokens, and padding tokens are of nobody.
        of_token = starts.repeat_interleave(step.query_start_loc.diff(), output_size=num_live)
        types[:num_live].copy_(batch.inputs.positions[0, :num_live] >= of_token)
        types[num_live:].zero_()
