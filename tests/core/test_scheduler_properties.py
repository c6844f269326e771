"""Random traffic on a tiny engine. The toy engine asserts the invariants of specs/core.md section 8
after every call; here: every request gets the tokens that it would get alone."""

from __future__ import annotations

import random
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pelton.core.scheduler import _Draft

SETTINGS = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

engines = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 3),
        "num_drafts": st.sampled_from([0, 1, 3]),
        "counts_drafts": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "budget": st.sampled_from([1, 3, 4, 7, 16, 64]),
        "rows": st.integers(1, 4),
        "num_blocks": st.sampled_from([12, 16, 24]),
        "long_prefill": st.sampled_from([0, 1, 3, 8]),
        "prefix_caching": st.booleans(),
        "block_sizes": st.sampled_from([(4,), (4,), (2, 4), (3, 2)]),
        "windows": st.sampled_from([None, None, (None, 5), (6, None), (3, 8), (1, 4)]),
        "checkpoints": st.sampled_from([None, (6, 1), (12, 2), (12, 5)]),
        "max_model_len": st.sampled_from([24, 25, 40]),
        "seed": st.integers(0, 99),
        # Too few for some requests, enough for most, for all.
        "host_pages": st.sampled_from([0, 3, 12, 80]),
    }
)
# Few different prompts, so that prefixes are shared.
requests = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "length": st.integers(1, 17),
        "max_tokens": st.sampled_from([1, 2, 5, 12, None]),
        "min_tokens": st.integers(0, 1),
        "stop_token_ids": st.sampled_from([(), (3, 11, 30)]),
        "eos_token_ids": st.sampled_from([(), (7, 21)]),
        "ignore_eos": st.booleans(),
        "priority": st.integers(0, 2),
        "seed": st.integers(0, 2),
        "cache_salt": st.sampled_from([None, None, "x"]),
        # Of those that yield no tokens: what is pooled.
        "method": st.sampled_from([None, None, None, "last", "mean", "all"]),
    }
)
actions = st.lists(
    st.one_of(
        requests,
        st.sampled_from(["launch", "land", "tick", "tick", "tick"]),
        st.tuples(st.sampled_from(["abort", "preempt"]), st.integers(0, 8)),
    ),
    min_size=5,
    max_size=60,
)


def make(toy_engine, options):
    """The engine; a single group has the first of the windows. Checkpoints of an interval that is
    no multiple of the block sizes are found where both end; with them there are no host pages."""
    windows = options["windows"] and options["windows"][: len(options["block_sizes"])]
    host_pages = 0 if options["checkpoints"] else options["host_pages"]
    return toy_engine(**options | {"windows": windows, "host_pages": host_pages})


def play(engine, moves) -> set[str]:
    """Do the moves, then run to the end; names of the aborted requests."""
    aborted = set()
    for move in moves:
        if isinstance(move, dict):
            options = dict(move)
            family, length = options.pop("family"), options.pop("length")
            ids = [(17 * family + i * i) % 50 for i in range(length)]
            if (method := options.pop("method")) is not None:
                own = {name: options[name] for name in ("priority", "cache_salt")}
                engine.pool(f"r{len(engine.requests)}", ids, method, **own)
                continue
            engine.add(f"r{len(engine.requests)}", ids, **options)
        elif isinstance(move, tuple):
            kind, number = move
            name = f"r{number}"
            if kind == "preempt":
                engine.scheduler.preempt(name)
            elif engine.scheduler.abort(name):
                aborted.add(name)
            engine.scheduler.check_integrity()
        elif move == "launch" and len(engine.in_flight) < engine.depth:
            engine.launch()
        elif move == "land" and engine.in_flight:
            engine.land()
        elif move == "tick":
            engine.tick()
    engine.run(max_ticks=20_000)
    return aborted


def assert_alone_or(engine, options, excepted: set[str]) -> None:
    """Every request but the excepted got the tokens that it gets alone, where the pool may end a
    sequence before max_model_len does."""
    usable, length = options["num_blocks"] - 1, 0
    while sum(-(-(length + 1) // size) for size in options["block_sizes"]) <= usable:
        length += 1
    engine.max_model_len = min(options["max_model_len"], length + 1)
    for name in engine.requests.keys() - excepted:
        engine.assert_like_reference(name)


def blocks_needed(options) -> int:
    return sum(-(-18 // size) for size in options["block_sizes"])


@SETTINGS
@given(options=engines, moves=actions)
def test_every_request_gets_its_own_tokens(toy_engine, options, moves):
    """Cases 2, 4, 6, 12, 32: whatever comes, goes or is evicted meanwhile."""
    if blocks_needed(options) > options["num_blocks"] - 1:
        options["num_blocks"] = 24
    engine = make(toy_engine, options)
    aborted = play(engine, moves)
    assert_alone_or(engine, options, aborted)
    for name in aborted:
        assert name not in engine.ended


@SETTINGS
@given(options=engines, moves=actions, chaos=st.integers(0, 1000))
def test_preempted_after_every_launch(toy_engine, options, moves, chaos):
    """Case 2: a random victim for the first 40 launches."""
    options |= {"num_blocks": 24}
    engine = make(toy_engine, options)
    rng = random.Random(chaos)
    launch, left = engine.launch, [40]

    def launch_and_preempt():
        plan = launch()
        if left[0] and engine.requests:
            left[0] -= 1
            engine.scheduler.preempt(f"r{rng.randrange(len(engine.requests))}")
            engine.scheduler.check_integrity()
        return plan

    engine.launch = launch_and_preempt
    aborted = play(engine, moves)
    assert_alone_or(engine, options, aborted)


@SETTINGS
@given(
    options=engines,
    moves=actions,
    faults=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 2, 3])), max_size=4
    ),
)
def test_faults_hurt_only_their_request(toy_engine, options, moves, faults):
    """Cases 19, 20, 25: a bad row at a random output of random requests."""
    options |= {"num_blocks": 24, "max_model_len": 24}
    if options["block_sizes"] != (4,):
        options["num_blocks"] = 48
    engine = make(toy_engine, options)
    for number, index, status in faults:
        engine.device.faults[f"r{number}", index] = status
    aborted = play(engine, moves)
    bad = {name for name, reason in engine.ended.items() if reason == "error"}
    assert bad <= {f"r{number}" for number, _, _ in faults}
    assert_alone_or(engine, options, aborted | bad)


@SETTINGS
@given(
    options=engines,
    moves=actions,
    chaos=st.integers(0, 1000),
    broken=st.sets(st.integers(0, 40), max_size=4),
)
def test_failed_steps_hurt_only_their_requests(toy_engine, options, moves, chaos, broken):
    """What such a step copied to host pages and back is not used; everybody is preempted often."""
    options |= {"num_blocks": 48, "host_pages": 80}
    engine = make(toy_engine, options)
    engine.device.broken = broken
    rng = random.Random(chaos)
    launch, left = engine.launch, [40]

    def launch_and_preempt():
        plan = launch()
        if left[0] and engine.requests:
            left[0] -= 1
            engine.scheduler.preempt(f"r{rng.randrange(len(engine.requests))}")
            engine.scheduler.check_integrity()
        return plan

    engine.launch = launch_and_preempt
    aborted = play(engine, moves)
    bad = {name for name, reason in engine.ended.items() if reason == "error"}
    in_broken = {ref for plan in engine.plans if plan.step in broken for ref in plan.refs}
    assert len(bad) <= len(in_broken)
    assert_alone_or(engine, options, aborted | bad)


@SETTINGS
@given(options=engines, moves=actions)
def test_plain_rows_are_scheduled_and_booked_as_any_others(toy_engine, options, moves):
    """What goes without calls for rows that nothing special happens to is what those would do."""
    options |= {"num_blocks": 24, "num_drafts": 0, "seed": 3}
    first, second = make(toy_engine, options), make(toy_engine, options)
    general = second.scheduler
    general._may_be_plain = lambda rows: [False] * rows.plan.num_rows
    aborted = play(first, moves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Draft, "give_plain", lambda self, running, first: 0)
        assert play(second, moves) == aborted
    assert plain_of(first.plans) == plain_of(second.plans)
    assert first.outputs == second.outputs
    assert first.ended == second.ended
    assert first.scheduler.stats == general.stats


def plain_of(plans) -> list[dict]:
    """Comparable: arrays as lists."""
    return [_as_lists(asdict(plan)) for plan in plans]


def _as_lists(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _as_lists(one) for key, one in value.items()}
    return [_as_lists(one) for one in value] if isinstance(value, (list, tuple)) else value
