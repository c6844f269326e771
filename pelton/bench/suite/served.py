"""A server's side of the suite: requests at random times, long prompts among them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pelton.bench import serving
from pelton.bench.load import Asked
from pelton.bench.options import ServingOptions
from pelton.bench.suite.cases import Case, Timing
from pelton.core.plan import Int32Array
from pelton.errors import EngineError

Draw = Callable[[int, int], Int32Array]
"""(prompts, their length) -> token ids [prompts, length]"""


class Served:
    def __init__(self, url: str) -> None:
        self._url = url
        self._num_runs = 0

    def run(self, case: Case, draw: Draw) -> Timing:
        """Raises EngineError unless every request is answered in full."""
        return self._ask(case, draw, case.batch_size * case.seconds)

    def warm_up(self, case: Case, draw: Draw) -> None:
        self._ask(case, draw, case.batch_size)

    def _ask(self, case: Case, draw: Draw, count: int) -> Timing:
        # The same times for each way of serving, others for each run.
        self._num_runs += 1
        options = ServingOptions(
            url=self._url,
            num_prompts=count,
            num_warmups=0,
            request_rate=float(case.batch_size),
            output_len=case.output_len,
            ignore_eos=True,
            percentiles="99",
            seed=self._num_runs,
        )
        asked = [Asked(row, case.output_len) for row in draw(count, case.input_len).tolist()]
        middle = case.batch_size // 2
        for place in range(middle, count, case.batch_size):
            asked[place] = Asked(draw(1, case.long_len)[0].tolist(), case.output_len)
        result, outcomes = asyncio.run(serving.measure(options, asked))
        if any(one.num_tokens != case.output_len for one in outcomes):
            raise EngineError(
                f"not every stream made {case.output_len} tokens: {result['errors']}."
            )
        latencies = result["latencies_s"]
        return (
            latencies["itl"]["p99"],
            latencies["ttft"]["median"],
            result["output_tokens_per_s"],
        )
