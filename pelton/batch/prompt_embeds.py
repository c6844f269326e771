"""Embeddings of prompts on their way to the step that computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.core.plan import NewRow, SlotRef
from pelton.core.prompt_embeds import rows_among
from pelton.device.protocol import Device
from pelton.errors import RequestError

_Array = npt.NDArray[Any]
LayOver = Callable[[torch.Tensor], object]
"""Called in a launch with a step's token embeddings, [T, H]: writes over those that are given."""


def nothing_over(hidden: torch.Tensor) -> None:
    """Of a step without embeddings of prompts."""


class PromptEmbedRows(StepParticipant):
    """A step's embeddings, and no others, are on the device: as many as a step has tokens, whatever
    the prompts' lengths. The host keeps those that are still to come.

    What a step computes of prompts does not depend on what was sampled, so the host knows which
    rows they are. They are packed, and travel in one copy that nobody waits for.

    Args:
        max_tokens: of a step. is_enabled: else each is refused. is_first: of the stages of a
            pipeline; the others get hidden states, and only refuse what the first one does.
    """

    def __init__(
        self,
        device: Device,
        *,
        is_enabled: bool,
        is_first: bool = True,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._device = device
        self._is_enabled = is_enabled
        self._uploads = is_enabled and is_first
        size = max_tokens if self._uploads else 0
        self._rows = device.zeros((size, hidden_size), dtype)
        self._places = device.zeros((size,), torch.int64)
        self._to_come: dict[int, NewRow] = {}
        """By slot; without those whose last embedding is computed."""
        self._count = 0

    def add_request(self, row: NewRow) -> None:
        """Raises RequestError for embeddings that this engine does not take."""
        self._to_come.pop(row.ref.slot, None)
        embeds = row.prompt_embeds
        if embeds is None:
            return
        if not self._is_enabled:
            raise RequestError(
                "prompt_embeds need an engine with enable_prompt_embeds=True.",
                field="prompt_embeds",
            )
        wanted = (self._rows.shape[1], str(self._rows.dtype).removeprefix("torch."))
        if (embeds.width, embeds.dtype) != wanted:
            raise RequestError(
                f"prompt_embeds must have {wanted[0]} columns of {wanted[1]}, got {embeds.width} "
                f"of {embeds.dtype}.",
                field="prompt_embeds",
            )
        if self._uploads:
            self._to_come[row.ref.slot] = row

    def remove_request(self, ref: SlotRef) -> None:
        self._to_come.pop(ref.slot, None)

    def before_forward(self, batch: InputBatch) -> None:
        """Queue the copy of the step's embeddings."""
        self._count = 0
        if not (self._uploads and batch.descriptor.has_embeds):
            return
        pieces, places = self._take(batch)
        if not pieces:
            return
        self._count = count = sum(map(len, places))
        rows = self._device.host_buffer((count, self._rows.shape[1]), self._rows.dtype)
        # numpy has no bfloat16: the bits alone count.
        bits = np.dtype(f"i{rows.element_size()}")
        rows_np = rows.view(getattr(torch, bits.name)).numpy()
        np.concatenate([piece.view(bits) for piece in pieces], out=rows_np)
        at = self._device.host_buffer((count,), torch.int64)
        np.concatenate(places, out=at.numpy())
        self._device.copy_to_device(self._rows[:count], rows)
        self._device.copy_to_device(self._places[:count], at)

    def lay_over(self, batch: InputBatch) -> LayOver:
        """Of the step whose copy was queued last, if `batch` is its batch."""
        if not (batch.descriptor.has_embeds and self._count):
            return nothing_over
        return partial(_put, self._rows[: self._count], self._places[: self._count])

    def _take(self, batch: InputBatch) -> tuple[list[_Array], list[_Array]]:
        """[n, H] rows, and the tokens of the step that they are for; of each request."""
        pieces: list[_Array] = []
        places: list[_Array] = []
        first = 0
        for slot, computed, query_len in zip(
            batch.slots_np.tolist(), batch.computed_bound_np.tolist(), batch.query_len_np.tolist()
        ):
            row = self._to_come.get(slot)
            if row is not None and row.prompt_embeds is not None:
                ids = row.token_ids[computed : computed + query_len]
                start, count = rows_among(ids)
                if count:
                    pieces.append(row.prompt_embeds.rows[start : start + count])
                    places.append(first + np.flatnonzero(ids < 0))
                if start + count == len(row.prompt_embeds):
                    del self._to_come[slot]
            first += query_len
        return pieces, places


def _put(rows: torch.Tensor, places: torch.Tensor, hidden: torch.Tensor) -> None:
    """rows: [n, H] -> hidden[places]; the places differ."""
    hidden.index_copy_(0, places, rows)
