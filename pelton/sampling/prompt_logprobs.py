"""Log-probabilities of prompt tokens, for the rows that ask, out of the step's hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.core.plan import Int32Array, LogprobRows, NewRow, SlotRef
from pelton.device.protocol import Device
from pelton.errors import RequestError
from pelton.ops.step_kernels import step_kernel
from pelton.ops.step_tensors import RowTensors
from pelton.sampling.sampler import SampleOutput

MIN_TILE_ROWS = 64  # below this the head's product gets slow
MAX_TILE_ROWS = 1024
_POISON = -7


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens first:last of the step, all of the row of state `slot`."""

    first: int
    last: int
    slot: int


class HostRows:
    """Host memory for up to max_rows rows of up to `width` most likely tokens.

    Used densely, as [n, w], so that a copy from the device is one transfer.
    """

    def __init__(self, device: Device, max_rows: int, width: int) -> None:
        self.width = width
        self.token_logprobs = device.host_buffer((max_rows,), torch.float32)
        self.ranks = device.host_buffer((max_rows,), torch.int32)
        self._top_ids = device.host_buffer((max_rows * width,), torch.int32)
        self._top_logprobs = device.host_buffer((max_rows * width,), torch.float32)

    def top_ids(self, first: int, last: int, width: int) -> torch.Tensor:
        """[last - first, width]"""
        return self._top_ids[first * width : last * width].view(last - first, width)

    def top_logprobs(self, first: int, last: int, width: int) -> torch.Tensor:
        """[last - first, width]"""
        return self._top_logprobs[first * width : last * width].view(last - first, width)

    def poison(self) -> None:
        self.token_logprobs.numpy().fill(np.nan)
        self._top_logprobs.numpy().fill(np.nan)
        self.ranks.numpy().fill(_POISON)
        self._top_ids.numpy().fill(_POISON)


class PendingPromptLogprobs:
    """A step's prompt log-probabilities on their way to the host; nothing if nobody asked."""

    def collect(self) -> LogprobRows | None:
        """Copy them out, when the step's event has passed."""
        return None

    def release(self) -> None:
        """Give the host memory back; call once, whether collected or not."""


NOTHING = PendingPromptLogprobs()


class CopiedPromptLogprobs(PendingPromptLogprobs):
    """offsets: [B + 1], rows of each batch row. width: columns that were copied."""

    def __init__(
        self, owner: PromptLogprobRows, host: HostRows, offsets: Int32Array, width: int
    ) -> None:
        self._owner = owner
        self._host = host
        self._offsets = offsets
        self._width = width

    def collect(self) -> LogprobRows:
        host, n = self._host, int(self._offsets[-1])
        return LogprobRows(
            offsets=self._offsets,
            token_logprobs=host.token_logprobs.numpy()[:n].copy(),
            ranks=host.ranks.numpy()[:n].copy(),
            top_ids=host.top_ids(0, n, self._width).numpy().copy(),
            top_logprobs=host.top_logprobs(0, n, self._width).numpy().copy(),
        )

    def release(self) -> None:
        self._owner.take_back(self._host)


class PromptLogprobRows(StepParticipant):
    """Who asks, and the work for them: the head on their prompt's positions, tile by tile.

    The position that a token stands at is scored by the hidden state before it, so the last token
    of a prompt is the last one scored; what follows it is sampled. A resumed request's outputs are
    fed like a prompt, and are not scored.

    Device memory is lent by the head. Host memory is allocated when a row asks, kept while steps
    use it or a row asks, and given up then.

    Args:
        head: hidden [N, H] -> logits [N, V], inside a launch.
        num_rows: slots, reserved ones included.
        max_tokens: of a step.
    """

    def __init__(
        self,
        device: Device,
        rows: RowTensors,
        head: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        num_rows: int,
        max_tokens: int,
        max_logprobs: int,
    ) -> None:
        self._device = device
        self._rows = rows
        self._head = head
        self._logprobs = step_kernel("logprobs", device.torch_device.type)
        self._max_tokens = max_tokens
        self._max_logprobs = max_logprobs
        self._width_np = np.full(num_rows, -1, np.int32)
        self._prompt_len_np = np.zeros(num_rows, np.int32)
        self._num_asking = 0
        self._free: list[HostRows] = []

    def add_request(self, row: NewRow) -> None:
        """Raises RequestError for more than the engine allows."""
        width = row.params.prompt_logprobs
        if width is None:
            return
        if width > self._max_logprobs:
            raise RequestError(
                f"prompt_logprobs must be at most {self._max_logprobs} (max_logprobs of the "
                f"engine, and no more than its vocabulary), got {width}: ask for fewer.",
                field="prompt_logprobs",
            )
        self._width_np[row.ref.slot] = width
        self._prompt_len_np[row.ref.slot] = row.prompt_len
        self._num_asking += 1

    def remove_request(self, ref: SlotRef) -> None:
        if self._width_np[ref.slot] < 0:
            return
        self._width_np[ref.slot] = -1
        self._num_asking -= 1
        if not self._num_asking:
            self._free.clear()

    @property
    def is_asked(self) -> bool:
        """Whether any row may want something of a step."""
        return self._num_asking > 0

    def take_back(self, host: HostRows) -> None:
        """The step that used it is over."""
        if self._device.poisons:
            host.poison()
        if self._num_asking:
            self._free.append(host)

    def run(
        self, batch: InputBatch, hidden: torch.Tensor, logits: torch.Tensor, out: SampleOutput
    ) -> PendingPromptLogprobs:
        """Queue the work and the copies of one step.

        hidden: [T, H] of the step. logits: [M, V] and out, of M rows: memory that this may use now.
        """
        if not self._num_asking:
            return NOTHING
        # Where a prompt is being read no draft is in flight, so the bound is exact.
        computed, slots = batch.computed_bound_np, batch.slots_np
        left = self._prompt_len_np[slots] - 1 - computed
        asks = self._width_np[slots] >= 0
        counts = np.where(asks, np.minimum(batch.query_len_np, left), 0).clip(min=0)
        offsets = np.zeros(batch.num_rows + 1, np.int32)
        counts.cumsum(out=offsets[1:])
        if not offsets[-1]:
            return NOTHING
        width = int(self._width_np[slots[counts > 0]].max())
        starts = batch.query_len_np.cumsum() - batch.query_len_np
        at = np.flatnonzero(counts).tolist()
        pieces = [Piece(int(starts[b]), int(starts[b] + counts[b]), int(slots[b])) for b in at]
        host = self._take(width)
        done = 0
        for tile in tiles(pieces, min(len(logits), MAX_TILE_ROWS)):
            n = sum(piece.last - piece.first for piece in tile)
            self._device.launch(self._score, tile, batch, hidden, logits[:n], out, width)
            self._copy_out(host, out, done, n, width)
            done += n
        return CopiedPromptLogprobs(self, host, offsets, width)

    def _take(self, width: int) -> HostRows:
        while self._free:
            host = self._free.pop()
            if host.width >= width:
                return host
        return HostRows(self._device, self._max_tokens, width)

    def _copy_out(
        self, host: HostRows, out: SampleOutput, first: int, count: int, width: int
    ) -> None:
        last = first + count
        for target, values in (
            (host.token_logprobs[first:last], out.token_logprobs[:count]),
            (host.ranks[first:last], out.ranks[:count]),
            (host.top_ids(first, last, width), out.top_ids[:count, :width]),
            (host.top_logprobs(first, last, width), out.top_logprobs[:count, :width]),
        ):
            self._device.deliver(target, values)

    def _score(
        self,
        tile: Sequence[Piece],
        batch: InputBatch,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        out: SampleOutput,
        width: int,
    ) -> None:
        """The kernel: logits and log-probabilities of a tile's tokens."""
        n = len(logits)
        positions = batch.inputs.positions[0]
        targets = [
            self._rows.tokens[piece.slot].index_select(0, positions[piece.first : piece.last] + 1)
            for piece in tile
        ]
        self._head(torch.cat([hidden[piece.first : piece.last] for piece in tile]), logits)
        self._logprobs(
            logits,
            torch.cat(targets),
            out.token_logprobs[:n],
            out.ranks[:n],
            out.top_ids[:n, :width],
            out.top_logprobs[:n, :width],
        )


def tiles(pieces: Sequence[Piece], max_rows: int) -> list[list[Piece]]:
    """The pieces in order, cut into lists of max_rows tokens; the last list may have fewer."""
    found: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        first = piece.first
        while first < piece.last:
            if room == 0:
                found.append([])
                room = max_rows
            last = min(piece.last, first + room)
            found[-1].append(Piece(first, last, piece.slot))
            room -= last - first
            first = last
    return found
