"""What has arrived of a request's pooled result, over chunks and lives."""

from __future__ import annotations

import numpy as np

from pelton.core.plan import Float32Array


class Pooled:
    """Collects what steps yield: one vector [D] at the end, or rows [t, D] of each chunk."""

    def __init__(self, *, is_per_token: bool) -> None:
        self._is_per_token = is_per_token
        self._pieces: list[Float32Array] = []

    def add(self, position: int, values: Float32Array) -> None:
        """What a step made of the tokens from `position` on. At 0 a life of the request begins:
        what an earlier one brought is computed again."""
        if position == 0 or not self._is_per_token:
            self._pieces.clear()
        self._pieces.append(values)

    def joined(self) -> Float32Array:
        """The whole result: [D], or [T, D]."""
        return np.concatenate(self._pieces) if self._is_per_token else self._pieces[0]
