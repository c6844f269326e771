"""What Prometheus scrapes. Names are vLLM's behind a prefix, so that dashboards fit both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pelton.metrics.step_sizes import EDGES

disable_created_metrics()  # type: ignore[no-untyped-call]  # a third of the lines, read by nobody

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "num_requests_running": "Requests that have KV blocks.",
    "num_requests_waiting": "Requests that wait for their turn.",
    "kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens that the prefix cache provided.",
    "num_preemptions": "Requests that gave up their KV blocks and were computed again.",
    "generation_tokens": "Tokens generated.",
    "corrupted_requests": "Requests that the engine failed to finish.",
    "spec_decode_num_drafts": "Rows that had drafts to verify.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that stood.",
    "kv_offload_saved_tokens": "Computed tokens of preempted requests that went to host memory.",
    "kv_offload_restored_tokens": "Tokens that were copied back from host memory.",
    "kv_offload_recomputed_tokens": "Tokens of preempted requests that were computed again.",
}
ENGINE_NAMES = (*_GAUGES, *_COUNTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNumbers:
    """What the engine tells at a scrape.

    values: by the names of ENGINE_NAMES. step_sizes: of StepSizes, or nothing yet;
    num_step_tokens: of all these steps together.
    """

    values: Mapping[str, float]
    step_sizes: Sequence[int]
    num_step_tokens: int


def _one_two_five(most: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    found: list[float] = []
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > most:
                return found
            found.append(factor * power)
        power *= 10


_SHORT = [0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1]
_SHORT += [0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
_FIRST = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5]
_FIRST += [10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]
_LONG = [0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]
_LONG += [120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0]
_ANSWERS = [1, 2, 5, 10, 20]
_PREEMPTIONS = [0, 1, 2, 5, 10, 20]


class ServerMetrics:
    """Everything that is measured while one model is served, in a registry of its own.

    num_prompt_tokens: of all prompts so far.
    num_first_tokens, first_token_seconds: requests that have got one, and what they waited for it
        in all.

    Args:
        model_name: label of every sample.
        max_model_len: the largest bucket of token counts.
        engine: the engine's numbers now. Asked at every scrape.
        cache_info: labels that describe the KV cache.
        prefix: of all names: "pelton", or "vllm" for dashboards made for it.
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        engine: Callable[[], EngineNumbers],
        cache_info: Mapping[str, str],
        prefix: str = "pelton",
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        sizes = _one_two_five(max_model_len)
        self.num_prompt_tokens = 0
        self.num_first_tokens = 0
        self.first_token_seconds = 0.0
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self._prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens that were not computed, but found in the cache."
        )
        self._prompt_tokens_by_source = Counter(
            f"{prefix}:prompt_tokens_by_source",
            "Prompt tokens, by where their keys and values came from.",
            [*self._labels, "source"],
            registry=self._registry,
        )
        self.admission_rejections = self._counter(
            "admission_rejections", "Requests that were refused because the queue was full."
        )
        self._success = Counter(
            f"{prefix}:request_success",
            "Answers that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        histogram = self._histogram
        self._time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between tokens.", _SHORT
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token of an answer.", _SHORT
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to last token.", _LONG)
        self.queue_time = histogram(
            "request_queue_time_seconds", "Time between arrival and the first step.", _LONG
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "Time between the first step and the first token.",
            _LONG,
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Time between an answer's first and last token.", _LONG
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "Time between the first step and the end.", _LONG
        )
        self.prompt_sizes = histogram("request_prompt_tokens", "Tokens of a prompt.", sizes)
        self.answer_sizes = histogram("request_generation_tokens", "Tokens of an answer.", sizes)
        self.longest_answers = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest answer.", sizes
        )
        self.params_n = histogram("request_params_n", "Answers that were asked for.", _ANSWERS)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Tokens that an answer might have.", sizes
        )
        self.preemptions = histogram(
            "request_num_preemptions", "How often a request gave up its KV blocks.", _PREEMPTIONS
        )
        self.computed_sizes = histogram(
            "request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were not found in the cache.",
            sizes,
        )
        self._registry.register(_EngineCollector(prefix, self._labels, engine, cache_info))

    def prompt_begun(self, num_tokens: int, num_cached: int) -> None:
        """Another prompt has its first token; `num_cached` of its tokens were not computed."""
        self.num_prompt_tokens += num_tokens
        self._prompt_tokens.inc(num_tokens)
        self._prompt_tokens_cached.inc(num_cached)
        by_source = self._prompt_tokens_by_source.labels
        by_source(*self._labels.values(), "local_compute").inc(num_tokens - num_cached)
        by_source(*self._labels.values(), "local_cache_hit").inc(num_cached)

    def first_token(self, seconds: float) -> None:
        """A request has its first token, so long after it came."""
        self.num_first_tokens += 1
        self.first_token_seconds += seconds
        self._time_to_first_token.observe(seconds)

    def finished(self, reason: str) -> None:
        """Another answer has ended, for `reason`."""
        self._success.labels(*self._labels.values(), reason).inc()

    def expose(self) -> bytes:
        """The text that Prometheus reads; its type is CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(
            f"{self._prefix}:{name}", text, list(self._labels), registry=self._registry
        )
        return family.labels(*self._labels.values())

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(
            f"{self._prefix}:{name}",
            text,
            list(self._labels),
            buckets=buckets,
            registry=self._registry,
        )
        return family.labels(*self._labels.values())


class _EngineCollector(Collector):
    """The engine counts by itself; this shows its numbers as they are at a scrape."""

    def __init__(
        self,
        prefix: str,
        labels: Mapping[str, str],
        engine: Callable[[], EngineNumbers],
        cache_info: Mapping[str, str],
    ) -> None:
        self._prefix = prefix
        self._labels = labels
        self._engine = engine
        self._cache_info = cache_info

    def collect(self) -> Iterator[Metric]:
        numbers = self._engine()
        values = list(self._labels.values())
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"{self._prefix}:{name}", text, labels=list(self._labels))
                metric.add_metric(values, numbers.values[name])
                yield metric
        by_reason = GaugeMetricFamily(
            f"{self._prefix}:num_requests_waiting_by_reason",
            "Requests that wait, by what for; capacity: rows or KV blocks.",
            labels=[*self._labels, "reason"],
        )
        by_reason.add_metric([*values, "capacity"], numbers.values["num_requests_waiting"])
        yield by_reason
        yield self._steps(numbers)
        info = {**self._cache_info, "engine": self._labels["engine"]}
        metric = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "How the KV cache is made.", labels=list(info)
        )
        metric.add_metric(list(info.values()), 1.0)
        yield metric

    def _steps(self, numbers: EngineNumbers) -> Metric:
        metric = HistogramMetricFamily(
            f"{self._prefix}:iteration_tokens_total",
            "Tokens that a step computed, drafts and recomputed ones included.",
            labels=list(self._labels),
        )
        sums = list(accumulate(numbers.step_sizes)) or [0] * (len(EDGES) + 1)
        edges = [*map(floatToGoString, EDGES), "+Inf"]
        metric.add_metric(
            list(self._labels.values()),
            buckets=list(zip(edges, sums, strict=True)),
            sum_value=numbers.num_step_tokens,
        )
        return metric
