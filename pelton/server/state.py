"""What the routes share."""

from __future__ import annotations

import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

from pelton.config.server import ServerArgs
from pelton.engine.async_llm import AsyncLLM, EngineStats
from pelton.metrics.prometheus import EngineNumbers, ServerMetrics
from pelton.server.endpoint import InFlight
from pelton.server.errors import unavailable
from pelton.server.pooling import PoolingService
from pelton.server.prompts import PromptReader
from pelton.server.service import Service

_RESTART_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class ServerState:
    """One served model. root: its checkpoint's name. created: seconds since 1970; started: the same
    moment on the monotonic clock. is_stopping: what runs is finished, and nothing else is begun."""

    engine: AsyncLLM
    service: Service
    pooling: PoolingService
    reader: PromptReader
    metrics: ServerMetrics
    args: ServerArgs
    names: list[str]
    root: str
    max_model_len: int
    pool: Executor
    in_flight: InFlight = field(default_factory=InFlight)
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.monotonic)
    is_stopping: bool = False

    def check_open(self) -> None:
        """Raises ApiError, 503, when no more requests are taken."""
        if self.is_stopping:
            raise unavailable("The server is stopping.", retry_after=_RESTART_SECONDS)


def engine_numbers(now: EngineStats) -> EngineNumbers:
    """An engine's counts, as metrics/prometheus.py has them."""
    stats = now.scheduler
    values = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": now.num_queued,
        "kv_cache_usage_perc": stats.kv_usage,
        "prefix_cache_queries": stats.num_cache_queries,
        "prefix_cache_hits": stats.num_cache_hits,
        "num_preemptions": stats.num_preemptions,
        "generation_tokens": stats.num_generated_tokens,
        "corrupted_requests": stats.num_errors,
        "spec_decode_num_drafts": stats.num_drafts,
        "spec_decode_num_draft_tokens": stats.num_draft_tokens,
        "spec_decode_num_accepted_tokens": stats.num_accepted_tokens,
        "kv_offload_saved_tokens": stats.num_saved_tokens,
        "kv_offload_restored_tokens": stats.num_restored_tokens,
        "kv_offload_recomputed_tokens": stats.num_recomputed_tokens,
    }
    return EngineNumbers(
        values=values,
        step_sizes=stats.step_sizes,
        num_step_tokens=stats.num_scheduled_tokens,
    )
