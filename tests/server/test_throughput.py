from __future__ import annotations

from dataclasses import replace

from pelton.core.scheduler import SchedulerStats
from pelton.server.throughput import throughput_line

NOTHING = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0, 0)


def test_rates_are_of_the_interval() -> None:
    before = replace(NOTHING, num_generated_tokens=100, num_cache_queries=50, num_cache_hits=50)
    now = replace(
        before,
        num_running=3,
        kv_usage=0.25,
        num_generated_tokens=150,
        num_cache_queries=150,
        num_cache_hits=75,
        num_draft_tokens=10,
        num_accepted_tokens=4,
    )
    line = throughput_line(before, now, num_queued=2, prompt_rate=20.0, seconds=5.0)
    assert line == (
        "prompts 20.0 tokens/s, answers 10.0 tokens/s, 3 running, 2 waiting, KV cache 25.0%, "
        "prefix hits 25.0%, drafts accepted 40.0%"
    )
    quiet = throughput_line(NOTHING, NOTHING, num_queued=0, prompt_rate=0.0, seconds=5.0)
    assert "hits" not in quiet
    assert "drafts" not in quiet
