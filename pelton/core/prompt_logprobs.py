"""What has arrived of a request's prompt log-probabilities, over chunks and lives."""

from __future__ import annotations

import numpy as np

from pelton.core.plan import LogprobRows


class PromptLogprobs:
    """Collects the rows of prompt positions 1, 2, ... in order; each position counts once.

    Position 0 has no row: nothing comes before it. The row of position p is made of the hidden
    state at p - 1.

    Args:
        width: how many most likely tokens were asked for.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._pieces: list[LogprobRows] = []
        self.num_known = 0

    def add(self, position: int, rows: LogprobRows, batch_row: int) -> None:
        """Take a batch row's part of a step, the first of which is the row of `position`. What an
        earlier life of the request brought already is left out."""
        first, last = rows.offsets[batch_row : batch_row + 2].tolist()
        first += self.num_known + 1 - position
        assert position <= self.num_known + 1, "positions have been skipped"
        if first < last:
            self._pieces.append(_part(rows, first, last, self._width))
            self.num_known += last - first

    def joined(self) -> LogprobRows:
        """All of them, [num_known] rows of one batch row."""
        empty = LogprobRows(
            offsets=np.zeros(1, np.int32),
            token_logprobs=np.zeros(0, np.float32),
            ranks=np.zeros(0, np.int32),
            top_ids=np.zeros((0, self._width), np.int32),
            top_logprobs=np.zeros((0, self._width), np.float32),
        )
        pieces = [empty, *self._pieces]
        return LogprobRows(
            offsets=np.array([0, self.num_known], np.int32),
            token_logprobs=np.concatenate([piece.token_logprobs for piece in pieces]),
            ranks=np.concatenate([piece.ranks for piece in pieces]),
            top_ids=np.concatenate([piece.top_ids for piece in pieces]),
            top_logprobs=np.concatenate([piece.top_logprobs for piece in pieces]),
        )


def _part(rows: LogprobRows, first: int, last: int, width: int) -> LogprobRows:
    return LogprobRows(
        offsets=np.array([0, last - first], np.int32),
        token_logprobs=rows.token_logprobs[first:last],
        ranks=rows.ranks[first:last],
        top_ids=rows.top_ids[first:last, :width],
        top_logprobs=rows.top_logprobs[first:last, :width],
    )
