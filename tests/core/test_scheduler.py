"""The scheduler, case by case. Set-up as in bug_reports.md: 16 blocks of 4 tokens, 4 rows."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.config.cache import CacheConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import ALL_MASKED, BAD_TOKEN, NAN_LOGITS, StepResult
from pelton.core.prompt_embeds import PromptEmbeds
from pelton.core.scheduler import Scheduler
from pelton.errors import ConfigError, IntegrityError, RequestError, RequestFailed

DRAFTS = [0, 1, 3]


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i + i // 7) % 50 for i in range(length)]


def four_requests(engine, max_tokens: int = 30) -> None:
    for i in range(4):
        engine.add(f"r{i}", prompt(10, i), max_tokens=max_tokens, seed=i)


def test_plans_of_a_chunked_prompt_and_a_decode(toy_engine):
    """The worked example of specs/core.md 1.5c: a decode row and a 6-token prompt in chunks."""
    engine = toy_engine(budget=5, prefix_caching=False)
    engine.add("a", prompt(5), max_tokens=20)
    engine.launch()
    engine.add("b", prompt(6, 9), max_tokens=20)
    plans = [engine.launch() for _ in range(3)]
    assert [plan.num_scheduled_tokens.tolist() for plan in plans] == [[1, 4], [1, 2], [1, 1]]
    assert [plan.num_computed_bound.tolist() for plan in plans] == [[5, 0], [6, 4], [7, 6]]
    assert [plan.samples.tolist() for plan in plans] == [[True, False], [True, True], [True, True]]
    assert [[ref.slot for ref in plan.refs] for plan in plans] == [[0, 1]] * 3
    assert [len(plan.new_rows) for plan in plans] == [1, 0, 0]
    new = plans[0].new_rows[0]
    assert new.token_ids.dtype == np.int32
    assert (new.prefill_len, new.prompt_len, new.num_computed_tokens) == (6, 6, 0)
    assert [len(ids) for ids in new.block_ids] == [2]
    # a's 9th token starts its third block.
    assert [len(plan.block_appends) for plan in plans] == [0, 0, 0]
    appends = engine.launch().block_appends
    assert [(a.ref, a.first, len(a.block_ids)) for a in appends] == [(plans[0].refs[0], 2, 1)]
    engine.run()
    engine.assert_like_reference()


def test_rows_come_few_tokens_first_and_stable(toy_engine):
    engine = toy_engine(budget=300, rows=40, num_blocks=100, prefix_caching=False)
    for i in range(40):
        engine.add(f"r{i}", prompt((7, 3, 5, 3)[i % 4], i), max_tokens=2)
    plan = engine.launch()
    assert plan.num_scheduled_tokens.tolist() == [3] * 20 + [5] * 10 + [7] * 10
    slots = [*range(1, 40, 2), *range(2, 40, 4), *range(0, 40, 4)]
    assert [ref.slot for ref in plan.refs] == slots
    assert [new.request_id for new in plan.new_rows] == [f"r{i}" for i in range(40)]


def test_slots_are_reused_last_first_with_a_new_generation(toy_engine):
    engine = toy_engine(depth=1)
    for i in range(3):
        engine.add(f"r{i}", prompt(4, i), max_tokens=30)
    first = engine.launch()
    assert [(ref.slot, ref.generation) for ref in first.refs] == [(0, 1), (1, 1), (2, 1)]
    engine.land()
    assert engine.scheduler.abort("r0")
    assert engine.scheduler.abort("r2")
    engine.add("r3", prompt(4, 5), max_tokens=30)
    second = engine.launch()
    assert second.finished == [(0, 1), (2, 1)]
    assert [new.ref for new in second.new_rows] == [(2, 2)]


def test_long_prefill_threshold_caps_prompt_chunks_only(toy_engine):
    engine = toy_engine(long_prefill=2, num_drafts=3, depth=1)
    engine.add("a", prompt(5), max_tokens=8)
    counts = []
    while engine.scheduler.has_unfinished():
        counts.append(engine.launch().num_scheduled_tokens.tolist())
        engine.land()
    assert counts[:4] == [[2], [2], [1], [4]]


def test_prompts_with_logprobs_come_in_small_chunks_while_others_answer(toy_engine):
    """What is scored costs as much again as the layers, and others would wait for all of it."""
    engine = toy_engine(budget=40, max_scored=4, num_blocks=100, prefix_caching=False)
    engine.add("answering", prompt(5), max_tokens=20)
    engine.tick()
    engine.add("first", prompt(9, 3), max_tokens=2, prompt_logprobs=1)
    engine.add("second", prompt(9, 5), max_tokens=2, prompt_logprobs=1)
    engine.add("plain", prompt(11, 7), max_tokens=2)
    counts = []
    for _ in range(5):
        counts.append(engine.launch().num_scheduled_tokens.tolist())
        engine.land()
    # Both ask, and share; whoever comes behind them does not wait.
    assert counts == [[1, 1, 4, 11], [1, 1, 1, 4], [1, 1, 3], [1, 1, 4], [1, 1]]
    engine.run()
    engine.assert_like_reference()


def test_prompts_with_logprobs_are_read_at_once_where_nobody_waits(toy_engine):
    engine = toy_engine(budget=40, max_scored=4, num_blocks=100, prefix_caching=False)
    engine.add("ends", prompt(5), max_tokens=1)
    engine.add("first", prompt(15, 3), max_tokens=1, prompt_logprobs=1)
    engine.add("second", prompt(30, 5), max_tokens=1, prompt_logprobs=1)
    assert engine.launch().num_scheduled_tokens.tolist() == [5, 15, 20]
    engine.run()
    engine.assert_like_reference()


def test_nothing_to_run_is_none(toy_engine):
    engine = toy_engine()
    assert engine.scheduler.schedule() is None
    engine.add("a", prompt(4), max_tokens=1)
    assert engine.launch() is not None
    assert engine.launch() is None
    engine.run()
    assert engine.scheduler.schedule() is None


def test_stats_count(toy_engine):
    engine = toy_engine(depth=1)
    engine.add("a", prompt(9), max_tokens=3)
    engine.run()
    engine = toy_engine(depth=1)
    engine.add("a", prompt(9), max_tokens=3)
    engine.launch()
    assert engine.scheduler.stats.kv_usage == pytest.approx(3 / 15)
    engine.land()
    engine.add("b", prompt(9), max_tokens=3)
    engine.run()
    stats = engine.scheduler.stats
    assert (stats.num_cache_queries, stats.num_cache_hits) == (18, 8)
    assert stats.num_scheduled_tokens == 9 + 2 + 1 + 2
    assert stats.num_generated_tokens == 6
    assert engine.requests["b"].num_cached_tokens == 8
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (0, 0, 0)


@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_at_every_step(toy_engine, depth, num_drafts):
    """Case 2: prompts of 10, 30 outputs, chunks of 3, a preemption forced after step k, for all
    k: in prefill, on the first decode, with drafts in flight. Every token exactly once. Each depth
    meets every k, and so does each number of drafts; the whole product finds no more."""
    for k in range((depth + DRAFTS.index(num_drafts)) % 3, 60, 3):
        engine = toy_engine(depth=depth, num_drafts=num_drafts, long_prefill=3, num_blocks=64)
        four_requests(engine)
        for _ in range(k):
            engine.tick()
        hit = engine.scheduler.preempt(f"r{k % 4}")
        engine.scheduler.check_integrity()
        if hit:
            assert engine.requests[f"r{k % 4}"].num_preemptions == 1
        engine.run()
        engine.assert_like_reference()


@pytest.mark.parametrize("num_drafts", DRAFTS)
def test_preempted_by_a_tight_pool(toy_engine, num_drafts):
    """Case 2: four requests of 40 tokens in a pool of 60 preempt each other on their own."""
    engine = toy_engine(num_drafts=num_drafts, long_prefill=3)
    four_requests(engine)
    engine.run()
    assert engine.scheduler.stats.num_preemptions > 0
    engine.assert_like_reference()


def test_preemption_in_every_step_for_a_while_ends(toy_engine):
    """Case 2: slots do not run out when every request is preempted again and again."""
    engine = toy_engine(num_blocks=48)
    four_requests(engine)
    for k in range(200):
        engine.tick()
        engine.scheduler.preempt(f"r{k % 4}")
        engine.scheduler.check_integrity()
    engine.run()
    engine.assert_like_reference()


def test_late_result_of_a_preempted_life_is_dropped(toy_engine):
    """Case 2: the token in flight is neither delivered nor counted; the next life makes it."""
    engine = toy_engine()
    request = engine.add("a", prompt(10), max_tokens=5)
    engine.launch()
    engine.launch()
    assert engine.scheduler.preempt("a")
    assert engine.land() == []
    assert request.num_tokens == 10
    plan = engine.launch()
    assert (plan.preempted, plan.finished) == ([(0, 1)], [])
    assert plan.new_rows[0].ref == (0, 2)
    assert engine.land() == []
    engine.run()
    engine.assert_like_reference()


def test_a_resumed_row_carries_its_outputs_and_no_drafts(toy_engine):
    engine = toy_engine(depth=1, num_drafts=3, prefix_caching=False)
    request = engine.add("a", prompt(10), max_tokens=20)
    for _ in range(6):
        engine.tick()
    known = request.num_tokens
    assert known > 10
    assert engine.scheduler.preempt("a")
    plan = engine.launch()
    new = plan.new_rows[0]
    assert (new.prompt_len, new.prefill_len) == (10, known)
    assert plan.num_drafts.tolist() == [0]
    assert plan.samples.tolist() == [True]
    engine.run()
    engine.assert_like_reference()


def test_growth_evicts_the_worst_by_priority(toy_engine):
    """Case 4: A (priority 5, long prompt) came first, B (0) and C (1) later; B's growth evicts A,
    and B and C both get their token in that same step."""
    engine = toy_engine(policy="priority", budget=9, depth=1, long_prefill=2)
    engine.add("a", prompt(36), max_tokens=20, priority=5, seed=1)
    engine.launch()
    engine.land()
    engine.add("b", prompt(8, 1), max_tokens=20, priority=0, seed=2)
    engine.add("c", prompt(8, 2), max_tokens=20, priority=1, seed=3)
    while not engine.requests["a"].num_preemptions:
        assert engine.launch() is not None
        engine.land()
    evicting = engine.plans[-1]
    assert engine.requests["a"].num_output_tokens == 0
    refs = {engine.requests[name].ref for name in "bc"}
    assert len(evicting.preempted) == 1
    assert refs <= set(evicting.refs)
    assert evicting.num_tokens <= 9
    engine.run()
    engine.assert_like_reference()


def test_a_preempted_request_is_not_overtaken(toy_engine):
    """Case 4: new arrivals never pass a request that was preempted before they came."""
    engine = toy_engine(depth=1, rows=2)
    engine.add("old", prompt(20), max_tokens=30, seed=1)
    engine.add("victim", prompt(20, 5), max_tokens=30, seed=2)
    admitted = []
    for i in range(400):
        if i < 40:
            engine.add(f"new{i}", prompt(4, i), max_tokens=2, seed=i)
        plan = engine.launch()
        if plan is not None:
            admitted += [new.request_id for new in plan.new_rows]
            engine.land()
    assert engine.requests["victim"].num_preemptions > 0
    last_victim = len(admitted) - 1 - admitted[::-1].index("victim")
    assert not any(name.startswith("new") for name in admitted[:last_victim])
    engine.run()
    engine.assert_like_reference()


def test_nobody_is_admitted_in_a_step_that_preempts(toy_engine):
    """C would fit into what B leaves, and comes one step later."""
    engine = toy_engine(policy="priority", depth=1, rows=2)
    engine.add("a", prompt(26), max_tokens=20, priority=0, ignore_eos=True)
    engine.add("b", prompt(26, 5), max_tokens=20, priority=5, ignore_eos=True)
    engine.launch()
    engine.land()
    engine.add("c", prompt(3, 9), max_tokens=3, priority=1)
    while not engine.plans[-1].preempted:
        engine.launch()
        engine.land()
    assert not engine.plans[-1].new_rows
    assert [new.request_id for new in engine.launch().new_rows] == ["c"]
    engine.run()
    engine.assert_like_reference()


def test_cached_tokens_are_those_of_the_first_admission(toy_engine):
    engine = toy_engine(depth=1)
    request = engine.add("a", prompt(10), max_tokens=9)
    engine.launch()
    engine.land()
    engine.scheduler.preempt("a")
    engine.launch()
    assert engine.plans[-1].new_rows[0].num_computed_tokens == 8
    assert request.num_cached_tokens == 0
    engine.run()


def test_only_draining_rows_could_yield(toy_engine):
    """The one row that wants blocks waits for tokens in flight, and is not preempted for them."""
    engine = toy_engine(depth=3, num_blocks=6, prefix_caching=False)
    engine.add("short", prompt(8), max_tokens=1, seed=1)
    engine.add("long", prompt(11, 1), max_tokens=4, seed=2)
    engine.launch()  # short drains; 2 + 3 blocks: the pool is full
    assert engine.launch() is not None  # long's 12th token fits
    assert engine.launch() is None
    assert engine.requests["long"].num_preemptions == 0
    engine.run()
    assert engine.scheduler.stats.num_preemptions == 0
    engine.assert_like_reference()


@pytest.mark.parametrize("length", [59, 60, 61, 64, 65])
def test_what_cannot_fit_is_refused_at_once(toy_engine, length):
    """Case 3: 15 usable blocks of 4; the null block does not count. The output token needs no KV,
    so a prompt may fill the pool. A small one then works."""
    engine = toy_engine(max_model_len=200)
    if length <= 60:
        engine.add("big", prompt(length), max_tokens=5)
    else:
        with pytest.raises(RequestError, match=r"16|17") as caught:
            engine.add("big", prompt(length), max_tokens=1)
        assert "15 usable" in str(caught.value)
        assert str(length) in str(caught.value)
    engine.add("small", prompt(5), max_tokens=2)
    engine.run()
    assert len(engine.outputs["small"]) == 2
    if length <= 60:
        assert engine.ended["big"] == "length"
        assert len(engine.outputs["big"]) == 61 - length
        engine.max_model_len = 61
        engine.assert_like_reference("big")


@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_decoding_row_keeps_a_window_of_blocks(toy_engine, num_drafts, prefix_caching):
    """Window 6 of blocks of 2, beside full attention with blocks of 4."""
    engine = toy_engine(
        block_sizes=(4, 2),
        windows=(None, 6),
        num_blocks=60,
        max_model_len=60,
        num_drafts=num_drafts,
        prefix_caching=prefix_caching,
    )
    request = engine.add("a", prompt(20), max_tokens=39)
    most = 0
    while request.num_output_tokens < 36:
        engine.tick()
        if request.num_output_tokens > 1:
            held = len(request.blocks[1]) - request.num_passed_blocks[1]
            # The window, a block that it cuts, and what two steps in flight may reach.
            assert held <= 3 + 1 + num_drafts + 1
            most = max(most, len(request.blocks[1]))
    assert most >= 28
    engine.run()
    engine.assert_like_reference()


def test_group_matches_name_the_group_without_hits(toy_engine):
    """Case 11: full attention has the prefix, and the windows' blocks are gone."""
    engine = toy_engine(block_sizes=(4, 4), windows=(None, 5), depth=1)
    engine.add("a", prompt(17), max_tokens=1)
    engine.drain()
    cache = engine.scheduler._kv._cache
    for block in cache.blocks():
        if block.key[0] == 1:
            cache.remove(block)
    engine.add("b", prompt(17), max_tokens=1)
    engine.run()
    stats = engine.scheduler.stats
    assert stats.num_cache_hits == 0
    assert stats.num_group_matches == (16, 0)
    assert sum(stats.step_sizes) == stats.num_steps
    assert stats.step_sizes[2] == 0  # 9 to 16 tokens
    assert sum(stats.step_sizes[3:]) == 2  # the prompts, 17 tokens each


@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_lone_request_that_outgrows_the_pool_ends_with_length(toy_engine, depth, num_drafts):
    """Case 3: 60 tokens of KV and one that needs none."""
    engine = toy_engine(max_model_len=200, depth=depth, num_drafts=num_drafts)
    request = engine.add("a", prompt(10), max_tokens=None)
    engine.run(max_ticks=400)
    assert engine.ended["a"] == "length"
    assert request.num_tokens == 61
    assert request.num_preemptions == 0


@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"), [(63, 1, 1), (60, 4, 4), (60, None, 4), (62, 9, 2)]
)
def test_the_end_of_the_context(toy_engine, depth, num_drafts, length, max_tokens, expected):
    """Case 6: exactly the tokens asked for, no step too many, no position past the table."""
    engine = toy_engine(max_model_len=64, num_blocks=32, depth=depth, num_drafts=num_drafts)
    engine.add("a", prompt(length), max_tokens=max_tokens)
    engine.run()
    assert len(engine.outputs["a"]) == expected
    assert engine.ended["a"] == "length"
    if num_drafts == 0:
        assert len(engine.plans) == expected
    assert all(
        int(plan.num_computed_bound[0] + plan.num_scheduled_tokens[0]) <= 63
        for plan in engine.plans
    )


def test_one_token_requests_fill_every_row(toy_engine):
    """Case 6: a request whose only token is in flight holds no row, so 100 requests of one token
    take 25 steps of 4 rows at any depth."""
    for depth in (1, 2, 3):
        engine = toy_engine(depth=depth, num_blocks=64)
        for i in range(100):
            engine.add(f"r{i}", prompt(4, i), max_tokens=1, seed=i)
        engine.run()
        assert [plan.num_rows for plan in engine.plans] == [4] * 25
        engine.assert_like_reference()


def test_drafts_in_flight_do_not_count_as_tokens(toy_engine):
    """Case 6 (the over-correction): with 1 + 3 rows in flight only one token is certain, so the
    row goes on; and with all of them accepted it does not go on."""
    engine = toy_engine(num_drafts=3, depth=3, num_blocks=32)
    engine.add("a", prompt(4), max_tokens=6)
    launched = [engine.launch() for _ in range(4)]
    assert all(plan is not None for plan in launched)
    for low in (0.0, 0.99):
        engine = toy_engine(num_drafts=3, depth=2, num_blocks=32)
        engine.device.rng.random = lambda low=low: low  # 0: all accepted; 0.99: none
        engine.add("a", prompt(4), max_tokens=9)
        engine.run()
        engine.assert_like_reference()
        # 1 + 4 + 4; the second and third land one by one, after the fourth was launched.
        assert len(engine.plans) == (4 if low == 0.0 else 9)


@pytest.mark.parametrize("num_proposed", [0, 1, 3])
def test_no_more_is_verified_than_was_proposed(toy_engine, num_proposed):
    """Collected at once, the host knows the drafts exactly: without drafts a step costs nothing."""
    engine = toy_engine(num_drafts=3, depth=1, num_blocks=32)
    engine.device.rng.random = lambda: 0.99  # no draft is right
    engine.device.propose = lambda: num_proposed
    engine.add("a", prompt(4), max_tokens=12)
    engine.run()
    engine.assert_like_reference()
    # The last step has room for no draft that could yield a token.
    drafts = [plan.num_drafts.tolist() for plan in engine.plans]
    last = [min(num_proposed, left) for left in (2, 1, 0)]
    assert drafts == [[0], *[[num_proposed]] * 8, *[[n] for n in last]]
    assert all(plan.bounds_are_exact for plan in engine.plans)


def test_the_newest_result_forecasts_the_drafts(toy_engine):
    """With steps in flight the forecast lags behind, and the tokens are the same."""
    engine = toy_engine(num_drafts=3, depth=2, num_blocks=32)
    counts = iter([2, 0, 0, 3, 0] + [0] * 20)
    engine.device.propose = lambda: next(counts)
    engine.add("a", prompt(4), max_tokens=12)
    engine.launch()
    assert engine.launch().num_drafts.tolist() == [3]  # nothing known yet
    engine.land()
    plan = engine.launch()
    assert plan.num_drafts.tolist() == [2]
    assert not plan.bounds_are_exact  # three drafts are in flight
    engine.land()
    plan = engine.launch()
    assert plan.num_drafts.tolist() == [0]
    assert not plan.bounds_are_exact
    engine.land()
    assert engine.launch().bounds_are_exact
    engine.run()
    engine.assert_like_reference()


@pytest.mark.parametrize("count", [-7, 99])
def test_a_count_of_drafts_that_cannot_be_does_no_harm(toy_engine, count):
    engine = toy_engine(num_drafts=2, depth=2, num_blocks=32)
    engine.device.propose = lambda: count
    four_requests(engine, max_tokens=6)
    engine.run()
    engine.assert_like_reference()
    assert max(plan.num_drafts.max() for plan in engine.plans) <= 2


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_draft_behind_the_last_token(toy_engine, depth):
    """Case 6: a draft that could only yield tokens past max_tokens is not verified."""
    engine = toy_engine(num_drafts=3, depth=depth, num_blocks=32)
    engine.device.rng.random = lambda: 0.0
    engine.add("a", prompt(4), max_tokens=4)
    engine.run()
    engine.assert_like_reference()
    drafts = [plan.num_drafts.tolist() for plan in engine.plans]
    # Launched before the second result: only what is certain counts as here already.
    assert drafts == {1: [[0], [2]], 2: [[0], [2], [1]], 3: [[0], [2], [1], [0]]}[depth]


def test_accepted_drafts_that_bring_the_end_near_free_the_row(toy_engine):
    """Case 6: what lands can leave a request with all it needs in flight; no step more."""
    engine = toy_engine(num_drafts=3, depth=3, num_blocks=32)
    engine.device.rng.random = lambda: 0.0
    engine.add("a", prompt(4), max_tokens=6)
    for _ in range(3):
        engine.launch()
    engine.land()  # 1 known, 2 certain
    engine.land()  # 5 known, 1 certain: drained
    assert engine.launch() is None
    engine.run()
    engine.assert_like_reference()
    assert len(engine.plans) == 3


@pytest.mark.parametrize("num_drafts", DRAFTS)
@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7])
def test_any_budget_gives_the_same_tokens(toy_engine, budget, num_drafts):
    engine = toy_engine(budget=budget, num_drafts=num_drafts)
    for i in range(6):
        engine.add(f"r{i}", prompt(5 + 3 * i, i), max_tokens=9, seed=i)
    engine.run()
    engine.assert_like_reference()


@pytest.mark.parametrize("length", [4, 8, 12])
@pytest.mark.parametrize("block_sizes", [(4,), (2, 4)])
def test_full_hit_recomputes_the_last_token(toy_engine, length, block_sizes):
    """Case 9: prompts of whole blocks, twice; then the rewritten block is a private one."""
    engine = toy_engine(block_sizes=block_sizes, num_blocks=64)
    for name in ("first", "second"):
        request = engine.add(name, prompt(length), max_tokens=6)
        assert engine.launch().num_tokens == length - request.num_cached_tokens
        engine.drain()
    assert request.num_cached_tokens == (length - 1) // 4 * 4
    engine.assert_like_reference()
    engine.run()


def test_full_hits_after_reset_are_gone(toy_engine):
    """Case 9, and reset_prefix_cache: refused while blocks are in use, complete when not."""
    engine = toy_engine()
    engine.add("a", prompt(12), max_tokens=2)
    engine.launch()
    assert not engine.scheduler.reset_prefix_cache()
    engine.run()  # ends with a successful reset
    again = engine.add("b", prompt(12), max_tokens=2)
    engine.run()
    assert again.num_cached_tokens == 0
    assert engine.outputs["a"] == engine.outputs["b"]


def test_equal_prompts_at_the_same_time(toy_engine):
    """Case 9: 513 equal prompts of whole blocks; duplicates of a block are not merged."""
    engine = toy_engine(num_blocks=64, rows=32, budget=256)
    for i in range(513):
        engine.add(f"r{i}", prompt(8), max_tokens=2)
    engine.run()
    assert len({tuple(tokens) for tokens in engine.outputs.values()}) == 1
    assert engine.requests["r512"].num_cached_tokens == 4
    engine.assert_like_reference()


@pytest.mark.parametrize("after", range(1, 8))
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_abort_in_mid_prefill_leaves_no_poison(toy_engine, after, depth):
    """Case 12: 40 tokens in chunks of 8, aborted after each chunk, the blocks given to others, and
    the same prompt again."""
    engine = toy_engine(budget=8, depth=depth)
    engine.add("a", prompt(40), max_tokens=5)
    for _ in range(after):
        engine.launch()
        if len(engine.in_flight) == depth:
            engine.land()
    assert engine.scheduler.abort("a")
    engine.scheduler.check_integrity()
    for i in range(3):
        engine.add(f"other{i}", prompt(12, 7 + i), max_tokens=3)
    engine.add("again", prompt(40), max_tokens=5)
    engine.run()
    engine.assert_like_reference("again", "other0", "other1", "other2")


def test_nothing_is_cached_before_its_result_has_come(toy_engine):
    """Case 12: computed in launched steps is not computed."""
    engine = toy_engine(depth=3)
    engine.add("a", prompt(13), max_tokens=30)
    engine.launch()
    early = engine.add("early", prompt(13), max_tokens=2)
    engine.launch()
    assert early.num_cached_tokens == 0
    engine.land()
    late = engine.add("late", prompt(13), max_tokens=2)
    engine.launch()
    assert late.num_cached_tokens == 12
    engine.run()
    engine.assert_like_reference()


def test_outputs_are_cached_too(toy_engine):
    engine = toy_engine(depth=1)
    request = engine.add("a", prompt(6), max_tokens=7, ignore_eos=True)
    while engine.scheduler.has_unfinished():
        engine.launch()
        engine.land()
    follow = engine.add("b", [*prompt(6), *engine.outputs["a"], 1, 2], max_tokens=1)
    engine.run()
    assert request.num_tokens == 13
    assert follow.num_cached_tokens == 12


@pytest.mark.parametrize("options", [{"cache_salt": "x"}, {"adapter": "x"}])
def test_other_salt_or_adapter_is_no_hit(toy_engine, options):
    engine = toy_engine()
    engine.add("a", prompt(12), max_tokens=1)
    engine.launch()
    engine.land()
    other = engine.add("b", prompt(12), max_tokens=1, **options)
    same = engine.add("c", prompt(12), max_tokens=1)
    engine.launch()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_without_prefix_caching_there_are_no_hits(toy_engine):
    engine = toy_engine(prefix_caching=False)
    engine.add("a", prompt(12), max_tokens=1)
    engine.launch()
    engine.land()
    request = engine.add("b", prompt(12), max_tokens=1)
    engine.run()
    assert request.num_cached_tokens == 0
    assert request.block_hashes == []


@pytest.mark.parametrize("status", [NAN_LOGITS, ALL_MASKED, BAD_TOKEN, 77])
@pytest.mark.parametrize("num_drafts", DRAFTS)
def test_a_bad_row_ends_only_its_request(toy_engine, status, num_drafts):
    """Cases 19, 20: error at the fourth output; neighbours unchanged; nothing of it is kept."""
    engine = toy_engine(num_drafts=num_drafts, num_blocks=48)
    four_requests(engine, max_tokens=12)
    engine.device.faults["r1", 3] = status
    engine.run()
    assert engine.ended["r1"] == "error"
    assert engine.requests["r1"].error is not None
    assert "r1" in str(engine.requests["r1"].error)
    assert len(engine.outputs["r1"]) <= 3
    engine.assert_like_reference("r0", "r2", "r3")
    assert engine.scheduler.stats.num_errors == 1


def test_a_bad_request_leaves_no_block_in_the_cache(toy_engine):
    """Case 19: not from this life, not from one before; a block that a neighbour uses stays."""
    engine = toy_engine(depth=1, num_blocks=48)
    engine.add("bad", prompt(13), max_tokens=20)
    engine.device.faults["bad", 6] = NAN_LOGITS
    for _ in range(4):
        engine.tick()
    engine.scheduler.preempt("bad")
    while "bad" not in engine.ended:
        engine.tick()
    probe = engine.add("probe", prompt(13), max_tokens=20)
    engine.launch()
    assert probe.num_cached_tokens == 0
    engine.land()
    engine.add("bad2", prompt(13), max_tokens=20)
    engine.device.faults["bad2", 0] = NAN_LOGITS
    engine.launch()
    engine.land()
    assert engine.ended["bad2"] == "error"
    again = engine.add("again", prompt(13), max_tokens=1)
    engine.launch()
    assert again.num_cached_tokens == 12
    engine.run()
    engine.assert_like_reference("probe", "again")


@pytest.mark.parametrize("token", [-1, 50, 2**40])
@pytest.mark.parametrize("column", [0, 1])
def test_an_impossible_id_ends_only_its_request(toy_engine, token, column):
    """Case 25: ids -1, vocab and 2**40 from the worker, first or behind a good one."""
    engine = toy_engine(num_drafts=1, depth=1)
    engine.device.rng.random = lambda: 0.0
    four_requests(engine, max_tokens=8)
    engine.launch()
    engine.land()
    plan = engine.launch()
    result = engine.in_flight[0][1]
    wide = result.token_ids.astype(np.int64)
    row = plan.refs.index(engine.requests["r2"].ref)
    wide[row, column] = token
    result.token_ids = wide
    engine.land()
    assert engine.ended["r2"] == "error"
    assert str(token) in str(engine.requests["r2"].error)
    assert len(engine.outputs["r2"]) == 1
    engine.run()
    engine.assert_like_reference("r0", "r1", "r3")


@pytest.mark.parametrize("num_sampled", [-1, 0, 2])
def test_a_wrong_number_of_tokens_is_an_error(toy_engine, num_sampled):
    engine = toy_engine(depth=1)
    engine.add("a", prompt(4), max_tokens=5)
    engine.launch()
    engine.in_flight[0][1].num_sampled[0] = num_sampled
    engine.in_flight[0][1].token_ids = np.zeros((1, 3), np.int32)
    engine.land()
    assert engine.ended["a"] == "error"
    engine.run()


def test_a_failed_row_ends_only_its_request(toy_engine):
    """Case 25: the worker could not add a row."""
    engine = toy_engine()
    four_requests(engine, max_tokens=8)
    engine.launch()
    fault = RuntimeError("no adapter")
    engine.in_flight[0][1].failed[engine.requests["r2"].ref] = fault
    engine.land()
    assert engine.ended == {"r2": "error"}
    assert engine.requests["r2"].error is fault
    engine.run()
    engine.assert_like_reference("r0", "r1", "r3")


def test_a_failed_step_ends_its_requests_only(toy_engine):
    """Case 25: a request that was not in the step goes on, and so does the scheduler."""
    engine = toy_engine(rows=2)
    four_requests(engine, max_tokens=8)
    plan = engine.launch()
    engine.in_flight.popleft()
    fault = RuntimeError("device says no")
    updates = engine.scheduler.fail_step(plan, fault)
    engine.book(updates, None)
    assert engine.ended == {"r0": "error", "r1": "error"}
    assert engine.requests["r0"].error is fault
    engine.run()
    engine.assert_like_reference("r2", "r3")


def test_results_out_of_turn_are_refused(toy_engine):
    engine = toy_engine()
    engine.add("a", prompt(4), max_tokens=9)
    first, second = engine.launch(), engine.launch()
    results = [result for _, result in engine.in_flight]
    with pytest.raises(IntegrityError, match="out of turn"):
        engine.scheduler.update(second, results[1])
    with pytest.raises(IntegrityError, match="given the result of step 1"):
        engine.scheduler.update(first, results[1])
    engine.run()
    with pytest.raises(IntegrityError, match="out of turn"):
        engine.scheduler.update(first, results[0])


@pytest.mark.parametrize(
    ("ids", "options", "field", "limit"),
    [
        ([], {}, "prompt_token_ids", "at least 1"),
        ([999_999], {}, "prompt_token_ids", "from 0 to 49"),
        ([50], {}, "prompt_token_ids", "from 0 to 49"),
        ([1, -1], {}, "prompt_token_ids", "from 0 to 49"),
        ([2**40], {}, "prompt_token_ids", "32 bits"),
        ([2**70], {}, "prompt_token_ids", "integers"),
        ([1.5], {}, "prompt_token_ids", "integers"),
        ([True], {}, "prompt_token_ids", "integers"),
        (["1"], {}, "prompt_token_ids", "integers"),
        ([[1, 2]], {}, "prompt_token_ids", "integers"),
        ([[1, 2], [3]], {}, "prompt_token_ids", "integers"),
        ([1], {"stop_token_ids": [999_999], "min_tokens": 1}, "stop_token_ids", "from 0 to 49"),
        ([1] * 60, {}, "prompt_token_ids", "max_model_len=60"),
    ],
)
def test_bad_requests_are_refused(toy_engine, ids, options, field, limit):
    """Case 26: the message names field and limit; the next request works."""
    engine = toy_engine()
    with pytest.raises(RequestError, match=limit) as caught:
        engine.add("bad", ids, **options)
    assert caught.value.field == field
    assert not engine.scheduler.has_unfinished()
    engine.add("good", prompt(5), max_tokens=3)
    engine.run()
    engine.assert_like_reference("good")


def test_a_name_twice(toy_engine):
    """Case 26: refused while the first is unfinished, free afterwards."""
    engine = toy_engine()
    engine.add("a", prompt(5), max_tokens=1)
    with pytest.raises(RequestError, match="'a' is in use") as caught:
        engine.add("a", prompt(5), max_tokens=1)
    assert caught.value.field == "request_id"
    engine.run()
    engine.ended.clear()
    engine.add("a", prompt(5), max_tokens=1)
    engine.run()
    engine.assert_like_reference()


@pytest.mark.parametrize("ticks", range(0, 30, 3))
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_abort_anywhere_frees_everything(toy_engine, ticks, num_drafts):
    """Case 32: waiting, in prefill, in decode, in flight, drained, ended; twice; by unknown id."""
    engine = toy_engine(long_prefill=3, num_drafts=num_drafts, depth=3)
    for i in range(7):
        engine.add(f"r{i}", prompt(10, i), max_tokens=3 + i, seed=i)
    for _ in range(ticks):
        engine.tick()
    for i in (0, 2, 3, 6):
        alive = f"r{i}" not in engine.ended
        assert engine.scheduler.abort(f"r{i}") is alive
        assert engine.scheduler.abort(f"r{i}") is False
        engine.scheduler.check_integrity()
        assert engine.requests[f"r{i}"].finish_reason is not None
    assert engine.scheduler.abort("nobody") is False
    engine.run()
    engine.assert_like_reference("r1", "r4", "r5")


def test_many_cancelled_requests_leave_nothing(toy_engine):
    """Case 32: 10,000 requests, each cancelled at once or a little later."""
    engine = toy_engine(prefix_caching=False)
    scheduler = engine.scheduler
    for i in range(10_000):
        engine.add(f"r{i}", prompt(30, i), max_tokens=5)
        if i % 100 == 0:
            engine.tick()
        if i >= 20:
            scheduler.abort(f"r{i - 20 * (i % 2)}")
    for i in range(10_000):
        scheduler.abort(f"r{i}")
    assert not scheduler.has_unfinished()
    scheduler.check_integrity()
    assert engine.ended, "some got to their end before"
    for name in ("_requests", "_by_ref", "_waiting", "_running"):
        assert not getattr(scheduler, name)
    assert len(scheduler._finished_refs) <= 10_000 // 100 * 4
    assert scheduler.stats.kv_usage == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("long_prefill_token_threshold", -1),
        ("max_model_len", 1),
        ("vocab_size", 0),
        ("num_speculative_tokens", -1),
        ("num_blocks", 1),
        ("policy", "lifo"),
    ],
)
def test_limits_that_cannot_work(name, value):
    given = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "long_prefill_token_threshold": 0,
        "policy": "fcfs",
        "num_blocks": 16,
        "max_model_len": 20,
        "vocab_size": 50,
        "num_speculative_tokens": 0,
    } | {name: value}
    names = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "policy")
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        Scheduler(
            SchedulerConfig(**{key: given[key] for key in names}),
            CacheConfig(block_size=4, num_blocks=given["num_blocks"], dtype="float32"),
            [KVGroup(index=0, layers=(0,), block_size=4)],
            max_model_len=given["max_model_len"],
            vocab_size=given["vocab_size"],
            num_speculative_tokens=given["num_speculative_tokens"],
        )


def test_integrity_check_can_fail(toy_engine):
    """Each invariant, broken on purpose."""

    def fresh():
        engine = toy_engine(depth=1)
        engine.add("a", prompt(10), max_tokens=9)
        engine.launch()
        engine.land()
        engine.add("waits", prompt(10), max_tokens=9)
        engine.scheduler.check_integrity()
        return engine, engine.requests["a"]

    def leak_block(engine, request):
        request.blocks[0].pop()

    def cache_early(engine, request):
        block = request.blocks[0][2]
        engine.scheduler._kv._cache.insert(block, (0, b"x" * 32))
        request.num_cached_blocks[0] = 3

    def change_token(engine, request):
        request.token_ids[1] += 1

    def lose_slot(engine, request):
        engine.scheduler._free_slots.pop()

    def wrong_count(engine, request):
        request.num_computed_tokens += 1

    def lose_request(engine, request):
        engine.scheduler._waiting.clear()

    def share_block(engine, request):
        engine.scheduler._kv._pool.touch(request.blocks[0][2:])
        request.blocks[0].append(request.blocks[0][2])

    def use_null(engine, request):
        engine.scheduler._kv._pool.null.ref_count += 1

    def tear_list(engine, request):
        engine.scheduler._kv._pool._head.next.next = None

    for damage in (
        leak_block,
        cache_early,
        change_token,
        lose_slot,
        wrong_count,
        lose_request,
        share_block,
        use_null,
        tear_list,
    ):
        engine, request = fresh()
        damage(engine, request)
        with pytest.raises(IntegrityError):
            engine.scheduler.check_integrity()


def test_a_result_is_not_read_for_rows_that_are_gone(toy_engine):
    """A dropped row may hold anything."""
    engine = toy_engine()
    engine.add("a", prompt(4), max_tokens=9)
    plan = engine.launch()
    engine.scheduler.abort("a")
    nonsense = StepResult(
        step=plan.step,
        token_ids=np.full((1, 1), -9, np.int32),
        num_sampled=np.full(1, 55, np.int32),
        status=np.full(1, 3, np.int32),
    )
    assert engine.scheduler.update(plan, nonsense) == []
    engine.in_flight.clear()
    engine.run()


def test_embeddings_that_overflow_are_the_requests_fault(toy_engine):
    """Ids that do are the model's."""
    engine = toy_engine(depth=1)
    embeds = PromptEmbeds(np.zeros((2, 4), np.float32), "float32")
    engine.add("rows", [5, -1, -2], max_tokens=3, prompt_embeds=embeds)
    engine.add("ids", [5, 6, 7], max_tokens=3)
    engine.device.faults["rows", 0] = engine.device.faults["ids", 0] = NAN_LOGITS
    engine.run()
    error = engine.requests["rows"].error
    assert isinstance(error, RequestError)
    assert error.field == "prompt_embeds"
    assert "too large for this model" in str(error)
    assert isinstance(engine.requests["ids"].error, RequestFailed)


def test_plans_say_where_embeddings_of_a_prompt_may_be(toy_engine):
    """Chunks of 3 of 8 places, of which 1 and 4 are embeddings; then the same again, hit."""
    ids = [5, -1, 6, 7, -2, 8, 9, 10]
    embeds = PromptEmbeds(np.zeros((2, 4), np.float32), "float32")
    engine = toy_engine(long_prefill=3, depth=1)
    engine.add("a", ids, max_tokens=3, prompt_embeds=embeds)
    engine.drain()
    assert [plan.has_embeds for plan in engine.plans[:4]] == [True, True, False, False]
    assert engine.plans[0].new_rows[0].prompt_embeds is embeds
    count = len(engine.plans)
    for again, hit in (([*ids[:6], 11, 12], 4), ([*ids, 13], 8)):
        engine.add(f"b{hit}", again, max_tokens=2, prompt_embeds=embeds)
        engine.drain()
        plan = engine.plans[count]
        count = len(engine.plans)
        assert plan.num_computed_bound.tolist() == [hit]
        assert plan.has_embeds == (hit == 4)
        assert plan.new_rows[0].prompt_embeds is (embeds if hit == 4 else None)
    engine.add("text", prompt(9), max_tokens=2)
    engine.drain()
    assert not engine.plans[-2].has_embeds
