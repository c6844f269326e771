"""What became of requests to a server, in numbers. Tokens are counted, not chunks.

TTFT: from sending to the chunk with the first token. E2E: to the last chunk. TPOT: (E2E - TTFT) /
(tokens - 1) of a request. ITL: the gap before a token; tokens of one chunk share the gap before it.
Goodput: requests that keep all limits. All in seconds. (specs of vLLM's `bench serve`, but for
chunks of several tokens.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Outcome:
    """Of one request, on one clock.

    due: when it was to be sent; sent: when it was. chunks: time and number of tokens of each.
    num_prompt_tokens: 0 if the server does not tell. error: "" for a success.
    """

    due: float
    sent: float = 0.0
    end: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    num_prompt_tokens: int = 0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.chunks)

    @property
    def ttft(self) -> float:
        return next(time for time, count in self.chunks if count) - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """None for a single token."""
        num = self.num_tokens
        return (self.e2e - self.ttft) / (num - 1) if num > 1 else None

    @property
    def itl(self) -> list[float]:
        """One number per token after those of the first chunk."""
        found: list[float] = []
        last: float | None = None
        for time, count in self.chunks:
            if count and last is not None:
                found += [(time - last) / count] * count
            if count:
                last = time
        return found


def summarise(
    outcomes: Sequence[Outcome], percentiles: Sequence[float], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Everything that is told of a run, JSON-ready."""
    good = [one for one in outcomes if not one.error]
    begin = min((one.sent for one in outcomes), default=0.0)
    duration = max((one.end for one in outcomes), default=0.0) - begin
    num_tokens = sum(one.num_tokens for one in good)
    num_prompt_tokens = sum(one.num_prompt_tokens for one in good)
    num_kept = sum(_keeps(one, limits) for one in good)
    values: dict[str, list[float]] = {
        "ttft": [one.ttft for one in good],
        "tpot": [tpot for one in good if (tpot := one.tpot) is not None],
        "itl": [gap for one in good for gap in one.itl],
        "e2e": [one.e2e for one in good],
    }
    per_second = duration or 1.0
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "duration_s": duration,
        "total_input_tokens": num_prompt_tokens,
        "total_output_tokens": num_tokens,
        "requests_per_s": len(good) / per_second,
        "output_tokens_per_s": num_tokens / per_second,
        "total_tokens_per_s": (num_tokens + num_prompt_tokens) / per_second,
        "peak_output_tokens_per_s": max(tokens_by_second(good, begin), default=0),
        "peak_concurrency": peak_concurrency(outcomes),
        "mean_concurrency": sum(one.e2e for one in outcomes) / per_second,
        "max_lateness_s": max((one.sent - one.due for one in outcomes), default=0.0),
        "goodput_requests_per_s": num_kept / per_second if limits else None,
        "goodput_share": num_kept / len(outcomes) if limits and outcomes else None,
        "latencies_s": {name: distribution(list_, percentiles) for name, list_ in values.items()},
    }


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """Mean, median, standard deviation and percentiles (linear); None of nothing."""
    if not values:
        return None
    found = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    found |= {f"p{value:g}": np.percentile(values, value) for value in percentiles}
    return {name: float(value) for name, value in found.items()}


def tokens_by_second(outcomes: Sequence[Outcome], begin: float) -> list[int]:
    """Tokens that came in each second after `begin`."""
    found: dict[int, int] = {}
    for one in outcomes:
        for time, count in one.chunks:
            second = int(time - begin)
            found[second] = found.get(second, 0) + count
    return [found.get(second, 0) for second in range(max(found, default=-1) + 1)]


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests on their way at one moment; one that ends as another begins makes room."""
    changes = sorted([(one.sent, 1) for one in outcomes] + [(one.end, -1) for one in outcomes])
    now = peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _keeps(one: Outcome, limits: Mapping[str, float]) -> bool:
    found = {"ttft": one.ttft, "tpot": one.tpot or 0.0, "e2e": one.e2e}
    return all(found[name] <= limit for name, limit in limits.items())
