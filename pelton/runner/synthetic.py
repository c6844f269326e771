"""Steps that no request asked for, as ordinary plans on the reserved row.

All batch rows of such a plan are the reserved row, whose block table is empty: its keys and values
go to the null block, and nobody reads what it samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.plan import NewRow, SlotRef, StepPlan
from pelton.runner.model_runner import ModelRunner

STEP_ID = -1


def synthetic_plan(
    reserved_slot: int,
    *,
    query_lens: list[int],
    num_groups: int,
    params: SamplingParams | PoolingParams,
) -> StepPlan:
    """A plan of len(query_lens) rows with that many query tokens each, sorted ascending."""
    pooling = params if isinstance(params, PoolingParams) else None
    ref = SlotRef(reserved_slot, 0)
    num_rows = len(query_lens)
    row = NewRow(
        ref=ref,
        request_id="synthetic",
        token_ids=np.zeros(max(query_lens), np.int32),
        prompt_len=max(query_lens),
        num_computed_tokens=0,
        block_ids=tuple(np.zeros(0, np.int32) for _ in range(num_groups)),
        params=SamplingParams(temperature=0.0) if isinstance(params, PoolingParams) else params,
        pooling=pooling,
        seed=0,
    )
    return StepPlan(
        step=STEP_ID,
        refs=[ref] * num_rows,
        num_scheduled_tokens=np.array(sorted(query_lens), np.int32),
        num_drafts=np.zeros(num_rows, np.int32),
        num_computed_bound=np.zeros(num_rows, np.int32),
        samples=np.full(num_rows, pooling is None),
        new_rows=[row],
    )


def time_prompt(
    runner: ModelRunner,
    reserved_slot: int,
    *,
    num_groups: int,
    length: int,
    params: SamplingParams | PoolingParams,
) -> float:
    """Seconds that a prompt of `length` tokens takes, alone."""
    plan = synthetic_plan(reserved_slot, query_lens=[length], num_groups=num_groups, params=params)
    started = time.perf_counter()
    runner.finish(runner.start(plan)).collect()
    return time.perf_counter() - started


def warm_up(
    runner: ModelRunner,
    reserved_slot: int,
    *,
    num_groups: int,
    max_tokens: int,
    params: Sequence[SamplingParams | PoolingParams],
) -> None:
    """Run a prefill, and a step of one token for each further element of params: the first request
    then pays for no lazy initialisation.

    max_tokens: what a step, and a row, may hold.
    """
    query_len = min(16, max_tokens)
    for one in params:
        plan = synthetic_plan(
            reserved_slot, query_lens=[query_len], num_groups=num_groups, params=one
        )
        runner.finish(runner.start(plan)).collect()
        query_len = 1
