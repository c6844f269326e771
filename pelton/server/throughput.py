"""A line now and then about what the engine does."""

from __future__ import annotations

import asyncio
import logging
import time

from pelton.core.scheduler import SchedulerStats
from pelton.server.state import ServerState

log = logging.getLogger("pelton.server")


async def log_throughput(state: ServerState, interval: float) -> None:
    """Writes a line every `interval` seconds as long as there is work, and one when it has ended;
    runs until it is cancelled."""
    before, then = state.engine.stats().scheduler, time.monotonic()
    prompt_before = state.metrics.num_prompt_tokens
    was_busy = False
    while True:
        await asyncio.sleep(interval)
        stats = state.engine.stats()
        now, at, prompt_now = stats.scheduler, time.monotonic(), state.metrics.num_prompt_tokens
        is_busy = now.num_steps != before.num_steps or stats.num_open > 0
        if is_busy or was_busy:
            seconds = at - then
            log.info(
                "%s",
                throughput_line(
                    before,
                    now,
                    num_queued=stats.num_queued,
                    prompt_rate=(prompt_now - prompt_before) / seconds,
                    seconds=seconds,
                ),
            )
        before, then, prompt_before, was_busy = now, at, prompt_now, is_busy


def throughput_line(
    before: SchedulerStats,
    now: SchedulerStats,
    *,
    num_queued: int,
    prompt_rate: float,
    seconds: float,
) -> str:
    """What happened in `seconds` between two views of the counts. prompt_rate: tokens/s."""
    rate = (now.num_generated_tokens - before.num_generated_tokens) / seconds
    parts = [
        f"prompts {prompt_rate:.1f} tokens/s",
        f"answers {rate:.1f} tokens/s",
        f"{now.num_running} running",
        f"{num_queued} waiting",
        f"KV cache {now.kv_usage:.1%}",
    ]
    queries = now.num_cache_queries - before.num_cache_queries
    if queries:
        hits = now.num_cache_hits - before.num_cache_hits
        parts.append(f"prefix hits {hits / queries:.1%}")
    if drafts := now.num_draft_tokens - before.num_draft_tokens:
        accepted = now.num_accepted_tokens - before.num_accepted_tokens
        parts.append(f"drafts accepted {accepted / drafts:.1%}")
    return ", ".join(parts)
