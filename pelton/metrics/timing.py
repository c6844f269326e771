"""When things happened to a request, in seconds of the monotonic clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class AnswerTimes:
    """Of one answer: its first and its latest token, and how many there are."""

    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True)
class RequestTimes:
    """Of one request with its answers. `take` tells the intervals that dashboards show."""

    arrival: float = field(default_factory=time.monotonic)
    answers: dict[int, AnswerTimes] = field(default_factory=dict)
    first: float | None = None

    @property
    def to_first(self) -> float | None:
        """Seconds to the first token of any answer (TTFT), None before."""
        return None if self.first is None else self.first - self.arrival

    def take(self, index: int, num_tokens: int) -> float | None:
        """`num_tokens` > 0 tokens of answer `index` are here now. Returns the seconds since the
        tokens before them, divided among them (ITL); None for an answer's first ones."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        answer = self.answers.get(index)
        if answer is None:
            self.answers[index] = AnswerTimes(now, now, num_tokens)
            return None
        gap = (now - answer.last) / num_tokens
        answer.last = now
        answer.num_tokens += num_tokens
        return gap

    def per_output_token(self, index: int) -> float | None:
        """Mean seconds per token after the first (TPOT); None where there is no such token."""
        answer = self.answers.get(index)
        if answer is None or answer.num_tokens < 2:
            return None
        return (answer.last - answer.first) / (answer.num_tokens - 1)

    def elapsed(self) -> float:
        """Seconds since the request came (E2E when it ends)."""
        return time.monotonic() - self.arrival
