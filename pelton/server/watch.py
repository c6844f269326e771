"""What is measured and logged of each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from pelton.config.params import SamplingParams
from pelton.engine.outputs import RequestDelta
from pelton.errors import EngineBusy, RequestError
from pelton.metrics.prometheus import ServerMetrics
from pelton.metrics.timing import RequestTimes
from pelton.server.prompts import ReadyPrompt
from pelton.server.request_ids import logged
from pelton.server.service import Watch

log = logging.getLogger("pelton.requests")

_MAX_SHOWN = 1000  # characters of a prompt, tokens of one without text


class RequestWatch(Watch):
    """Feeds metrics, and writes a line when the request has ended.

    Args:
        metrics: to feed.
        what: method and path, for the line.
        shown_id: the client's own name of the request, or None.
        who: whom the request is for, as the client says, or None.
        logs_line: whether to write it. logs_prompts: whether it tells the prompts.
    """

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
        self._prompts: Sequence[ReadyPrompt] = ()
        self._num_cached: dict[int, int] = {}
        self._num_preemptions: dict[int, int] = {}
        self._n = 1
        self._max_tokens: int | None = None
        self._queued = 0.0
        self._reasons: dict[str, int] = {}

    def begin(
        self, request_id: str, prompts: Sequence[ReadyPrompt], params: SamplingParams
    ) -> None:
        self._id, self._prompts, self._n = request_id, prompts, params.n
        self._max_tokens = params.max_tokens

    def take(self, prompt: int, delta: RequestDelta) -> None:
        metrics, times = self._metrics, self._times
        if prompt not in self._num_cached:
            self._num_cached[prompt] = delta.num_cached_tokens
            metrics.prompt_begun(delta.num_prompt_tokens, delta.num_cached_tokens)
            self._queued = delta.queue_seconds or 0.0
            metrics.queue_time.observe(self._queued)
        self._num_preemptions[prompt] = delta.num_preemptions
        for answer in delta.outputs:
            index = prompt * self._n + answer.index
            count = len(answer.token_ids)
            if count:
                is_first = times.first is None
                gap = times.take(index, count)
                if gap is not None:
                    for _ in range(count):
                        metrics.inter_token_latency.observe(gap)
                elif is_first:
                    to_first = times.to_first or 0.0
                    metrics.first_token(to_first)
                    metrics.prefill_time.observe(max(to_first - self._queued, 0.0))
            if answer.finish_reason is not None:
                self._answer_ended(index, answer.finish_reason)

    def _answer_ended(self, index: int, reason: str) -> None:
        metrics = self._metrics
        metrics.finished(reason)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1
        answer = self._times.answers.get(index)
        metrics.answer_sizes.observe(answer.num_tokens if answer else 0)
        if answer is not None:
            metrics.decode_time.observe(answer.last - answer.first)
        per_token = self._times.per_output_token(index)
        if per_token is not None:
            metrics.time_per_output_token.observe(per_token)

    def end(self, error: BaseException | None) -> None:
        answers = self._times.answers.values()
        elapsed = self._times.elapsed()
        if error is None:
            self._metrics.e2e_latency.observe(elapsed)
            self._metrics.inference_time.observe(max(elapsed - self._queued, 0.0))
            self._metrics.longest_answers.observe(
                max((answer.num_tokens for answer in answers), default=0)
            )
        else:
            self._failed(error)
        if not isinstance(error, (EngineBusy, RequestError)):
            self._count_prompts()
        if self._logs_line and log.isEnabledFor(logging.INFO):
            log.info("%s", self._line(elapsed))

    def _count_prompts(self) -> None:
        """Of a request that the engine took, however it ended."""
        metrics = self._metrics
        for number, prompt in enumerate(self._prompts):
            metrics.prompt_sizes.observe(len(prompt.token_ids))
            metrics.params_n.observe(self._n)
            if self._max_tokens is not None:
                metrics.params_max_tokens.observe(self._max_tokens)
            if (num_cached := self._num_cached.get(number)) is not None:
                metrics.computed_sizes.observe(len(prompt.token_ids) - num_cached)
                metrics.preemptions.observe(self._num_preemptions[number])

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, EngineBusy):
            self._metrics.admission_rejections.inc()
            self._reasons["rejected"] = 1
            return
        if isinstance(error, RequestError):
            self._reasons["refused"] = 1
            return
        is_given_up = isinstance(error, (asyncio.CancelledError, GeneratorExit))
        reason = "abort" if is_given_up else "error"
        for _ in range(self._n * len(self._prompts) - sum(self._reasons.values())):
            self._metrics.finished(reason)
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def _line(self, elapsed: float) -> str:
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        num_tokens = sum(answer.num_tokens for answer in self._times.answers.values())
        parts = [f"{num_prompt_tokens} + {num_tokens} tokens"]
        if cached := sum(self._num_cached.values()):
            parts.append(f"{cached} cached")
        if len(self._prompts) > 1:
            parts.append(f"{len(self._prompts)} prompts")
        if self._n > 1:
            parts.append(f"n={self._n}")
        if (to_first := self._times.to_first) is not None:
            parts.append(f"first after {to_first:.3f} s")
        parts.append(f"{elapsed:.3f} s")
        parts.append(" ".join(sorted(self._reasons)))
        if self._who is not None:
            parts.append(f"for {self._who[:100]!r}")
        shown = "" if self._shown_id is None else f" ({logged(self._shown_id)})"
        line = f"{self._id}{shown} {self._what}: {', '.join(parts)}"
        if self._logs_prompts:
            lines = [prompt_line(one.text, one.token_ids.tolist()) for one in self._prompts]
            line += "".join(f"\n  prompt: {shown}" for shown in lines)
        return line


def prompt_line(text: str | None, token_ids: Sequence[int]) -> str:
    """A prompt as a log has it: its text, or its token ids where there is none; not all of a long
    one."""
    if text is None and token_ids and token_ids[0] < 0:
        return f"{len(token_ids)} embeddings"
    if text is None:
        return f"token ids {list(token_ids[:_MAX_SHOWN])}"
    return repr(text[:_MAX_SHOWN])
