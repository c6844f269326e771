"""How large steps are: counts for a histogram, kept where the steps are planned."""

from __future__ import annotations

from bisect import bisect_left

EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens. A step counts at the first edge that is not below its size; behind the last one at the
end. They are those of vLLM's iteration_tokens_total."""


class StepSizes:
    """Steps by their number of tokens."""

    def __init__(self) -> None:
        self._counts = [0] * (len(EDGES) + 1)

    def add(self, num_tokens: int) -> None:
        """One more step."""
        self._counts[bisect_left(EDGES, num_tokens)] += 1

    @property
    def counts(self) -> tuple[int, ...]:
        """[len(EDGES) + 1], not cumulated."""
        return tuple(self._counts)
