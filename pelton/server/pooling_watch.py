"""What is measured and logged of each request that is pooled."""

from __future__ import annotations

import asyncio
import logging

from pelton.errors import EngineBusy, RequestError
from pelton.metrics.prometheus import ServerMetrics
from pelton.metrics.timing import RequestTimes
from pelton.server.pooling import Output, PoolingWatch
from pelton.server.request_ids import logged
from pelton.server.watch import prompt_line

log = logging.getLogger("pelton.requests")


class LoggedPooling(PoolingWatch):
    """Feeds metrics, and writes a line when the request has ended. Arguments are RequestWatch's."""

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        what: str,
        shown_id: str | None = None,
        who: str | None = None,
        logs_line: bool = True,
        logs_prompts: bool = False,
    ) -> None:
        self._metrics = metrics
        self._what = what
        self._shown_id = shown_id
        self._who = who
        self._logs_line = logs_line
        self._logs_prompts = logs_prompts
        self._times = RequestTimes()
        self._id = ""
        self._num_prompts = 0
        self._num_done = 0
        self._num_tokens = 0
        self._num_cached = 0
        self._prompts: list[str] = []

    def begin(self, request_id: str, num_prompts: int) -> None:
        self._id, self._num_prompts = request_id, num_prompts

    def take(self, output: Output) -> None:
        length, cached = len(output.prompt_token_ids), output.num_cached_tokens
        self._num_done += 1
        self._num_tokens += length
        self._num_cached += cached
        metrics = self._metrics
        metrics.prompt_begun(length, cached)
        metrics.prompt_sizes.observe(length)
        metrics.computed_sizes.observe(length - cached)
        metrics.finished("stop")
        if self._logs_prompts:
            self._prompts.append(prompt_line(output.prompt, output.prompt_token_ids))

    def end(self, error: BaseException | None) -> None:
        elapsed = self._times.elapsed()
        how = self._failed(error) if error is not None else "done"
        if error is None:
            self._metrics.e2e_latency.observe(elapsed)
        if self._logs_line and log.isEnabledFor(logging.INFO):
            log.info("%s", self._line(elapsed, how))

    def _failed(self, error: BaseException) -> str:
        if isinstance(error, EngineBusy):
            self._metrics.admission_rejections.inc()
            return "rejected"
        if isinstance(error, RequestError):
            return "refused"
        is_given_up = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        reason = "abort" if is_given_up else "error"
        for _ in range(self._num_prompts - self._num_done):
            self._metrics.finished(reason)
        return reason

    def _line(self, elapsed: float, how: str) -> str:
        parts = [f"{self._num_tokens} tokens"]
        if self._num_cached:
            parts.append(f"{self._num_cached} cached")
        if self._num_prompts > 1:
            parts.append(f"{self._num_prompts} prompts")
        parts += [f"{elapsed:.3f} s", how]
        if self._who is not None:
            parts.append(f"for {self._who[:100]!r}")
        shown = "" if self._shown_id is None else f" ({logged(self._shown_id)})"
        line = f"{self._id}{shown} {self._what}: {', '.join(parts)}"
        return line + "".join(f"\n  prompt: {prompt}" for prompt in self._prompts)
