"""GET /health, /version, /load, /stats and /metrics."""

from __future__ import annotations

import time

import pelton
from pelton.metrics.prometheus import CONTENT_TYPE
from pelton.server.endpoint import Answer, Call
from pelton.server.errors import unavailable
from pelton.server.protocol import Health, Load, Stats, Version
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes


async def health(state: ServerState, call: Call) -> Answer:
    """200 while requests are taken; 503 when the server is stopping or the engine has died."""
    state.check_open()
    if not state.engine.is_alive:
        raise unavailable("The engine has stopped.")
    return Answer(json_bytes(Health()))


async def version(state: ServerState, call: Call) -> Answer:
    """Pelton's version."""
    return Answer(json_bytes(Version(pelton.__version__)))


async def load(state: ServerState, call: Call) -> Answer:
    """Requests in flight and queued, now."""
    stats = state.engine.stats()
    return Answer(
        json_bytes(
            Load(
                server_load=state.in_flight.now,
                num_requests_running=stats.scheduler.num_running,
                num_requests_waiting=stats.num_queued,
            )
        )
    )


async def stats(state: ServerState, call: Call) -> Answer:
    """The engine's state now, for those who ask every second."""
    now, metrics, facts = state.engine.stats(), state.metrics, state.engine.facts
    scheduler = now.scheduler
    return Answer(
        json_bytes(
            Stats(
                version=pelton.__version__,
                model=state.names[0],
                max_model_len=state.max_model_len,
                max_num_seqs=facts.max_num_seqs,
                num_kv_tokens=facts.num_kv_tokens,
                is_alive=state.engine.is_alive,
                uptime_seconds=time.monotonic() - state.started,
                num_requests_running=scheduler.num_running,
                num_requests_waiting=now.num_queued,
                kv_cache_usage=scheduler.kv_usage,
                prompt_tokens=metrics.num_prompt_tokens,
                generation_tokens=scheduler.num_generated_tokens,
                prefix_cache_queries=scheduler.num_cache_queries,
                prefix_cache_hits=scheduler.num_cache_hits,
                num_preemptions=scheduler.num_preemptions,
                first_tokens=metrics.num_first_tokens,
                first_token_seconds=metrics.first_token_seconds,
            )
        )
    )


async def metrics(state: ServerState, call: Call) -> Answer:
    """Numbers for Prometheus, in its text format."""
    return Answer(state.metrics.expose(), content_type=CONTENT_TYPE)
