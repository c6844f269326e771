"""How large the KV cache may be, by measuring what everything else takes.

A first runner, with next to no KV, does the largest step there is and records the largest shapes.
What the device then has left is the KV cache's, and nothing of it is guessed. That runner is thrown
away; the pool of memory that all recordings share stays the device's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

from pelton.config.engine import EngineConfig
from pelton.config.memory import MemoryTable
from pelton.core.kv.groups import with_tables
from pelton.device.protocol import MeasuredDevice
from pelton.errors import ConfigError
from pelton.runner.assemble import Assembled
from pelton.runner.capture import record_largest
from pelton.runner.synthetic import synthetic_plan, warm_up
from pelton.worker.asked import costly_params, first_params

# Kernels and handles that are loaded later.
_SLACK_BYTES = 256 * 2**20


def fit_cache(
    device: MeasuredDevice,
    config: EngineConfig,
    assemble: Callable[[EngineConfig], Assembled],
    rehearse: Callable[[Assembled], None],
    *,
    others: int,
    weights: int,
    agree_on_blocks: Callable[[int], int] = int,
) -> EngineConfig:
    """The configuration with as many KV blocks as there is room for, at most as many as it has, and
    with the table of memory.

    assemble: a runner for a configuration, over the loaded model. rehearse: has its kernels
    compiled. others: bytes that were in use before the model came. agree_on_blocks: as in Worker.
    Raises ConfigError when max_model_len does not fit.
    """
    share = config.cache.memory_share
    assert share is not None, "the size of the cache is given"
    least = 2
    cache = replace(config.cache, num_blocks=least, num_host_pages=0)
    probe = assemble(replace(config, cache=cache))
    rehearse(probe)
    kv_bytes, num_groups = probe.kv_bytes, len(with_tables(probe.groups))
    tokens = min(config.scheduler.max_num_batched_tokens, config.max_model_len - 1)
    warm_up(
        probe.runner,
        probe.reserved_slot,
        num_groups=num_groups,
        max_tokens=tokens,
        params=first_params(config),
    )
    _largest_step(config, probe, num_groups)
    device.synchronize()
    before, total = device.memory()
    per_recording = record_largest(device, probe.runner, probe.executor)
    graphs = device.memory()[0] - before
    graphs += per_recording * len(probe.executor.unrecorded())
    table = MemoryTable(
        others=others,
        weights=weights,
        activations=before - others - weights - kv_bytes + _SLACK_BYTES,
        graphs=graphs,
        kv=0,
        total=total,
    )
    del probe
    gc.collect()
    device.release_cached()
    per_block = kv_bytes // least
    left = max(int(share * total) - (total - table.free), 0)
    num_blocks = agree_on_blocks(min(config.cache.num_blocks, left // per_block))
    _check_fits(config, num_blocks, num_groups, per_block, table)
    return replace(
        config,
        cache=replace(config.cache, num_blocks=num_blocks),
        memory=replace(table, kv=num_blocks * per_block),
    )


def _largest_step(config: EngineConfig, probe: Assembled, num_groups: int) -> None:
    """As many tokens and rows as a step may have, and the head's most costly options."""
    left, longest = config.scheduler.max_num_batched_tokens, config.max_model_len - 1
    query_lens: list[int] = []
    while left and len(query_lens) < config.scheduler.max_num_seqs:
        # What is left over after a token for each row that is still to come.
        others = config.scheduler.max_num_seqs - len(query_lens) - 1
        query_lens.append(min(max(left - others, 1), longest))
        left -= query_lens[-1]
    plan = synthetic_plan(
        probe.reserved_slot,
        query_lens=query_lens,
        num_groups=num_groups,
        params=costly_params(config),
    )
    probe.runner.finish(probe.runner.start(plan)).collect()


def _check_fits(
    config: EngineConfig, num_blocks: int, num_groups: int, per_block: int, table: MemoryTable
) -> None:
    size = config.cache.block_size
    fits = max(num_blocks - 1, 0) // num_groups * size
    if fits >= config.max_model_len:
        return
    needed = 1 + num_groups * -(-config.max_model_len // size)
    share = (table.total - table.free + needed * per_block) / table.total
    ways = [f"lower max_model_len to {fits}"] if fits > 1 else []
    if share <= 1:
        ways.append(f"raise gpu_memory_utilization to {-(-share * 100 // 1) / 100:.2f}")
    half = config.scheduler.max_num_batched_tokens // 2
    ways.append(f"lower max_num_batched_tokens, perhaps to {max(half, 1)}")
    raise ConfigError(
        f"max_model_len={config.max_model_len} is above the {fits} tokens that the KV cache holds "
        f"beside everything else ({table.describe()}): {', or '.join(ways)}."
    )
