"""Preempted requests in host memory, step by step. Random traffic: test_scheduler_properties.py."""

from __future__ import annotations

import pytest

from pelton.core.kv.host_pages import MoveCosts
from pelton.errors import RequestFailed

PROMPT = list(range(10))


def engine_with(toy_engine, **options):
    defaults = {"host_pages": 40, "num_blocks": 40, "depth": 1, "prefix_caching": False}
    return toy_engine(**defaults | options)


def run_to_tokens(engine, name: str, num_tokens: int) -> None:
    while len(engine.outputs[name]) < num_tokens:
        engine.tick()


def test_a_preempted_request_comes_back_with_all_its_tokens(toy_engine):
    engine = engine_with(toy_engine)
    request = engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 4)
    table = [block.block_id for block in request.blocks[0]]
    assert request.num_confirmed_tokens == 13
    engine.scheduler.preempt("a")
    assert engine.scheduler._kv.host.num_free == 36
    plan = engine.launch()
    assert plan.offloads.block_ids.tolist() == table
    (row,) = plan.new_rows
    assert row.num_computed_tokens == 13
    assert row.restores.page_ids.tolist() == plan.offloads.page_ids.tolist()
    assert row.restores.block_ids.tolist() == row.block_ids[0].tolist()
    assert plan.num_scheduled_tokens.tolist() == [1]
    assert request.saved is not None
    engine.land()
    assert request.saved is None, "its pages are free when the step has shown that it has them"
    engine.run()
    engine.assert_like_reference()
    stats = engine.scheduler.stats
    assert (stats.num_saved_tokens, stats.num_restored_tokens) == (13, 13)
    assert stats.num_recomputed_tokens == 0
    assert stats.num_cache_hits == 0


def test_without_pages_it_is_computed_again(toy_engine):
    engine = engine_with(toy_engine, host_pages=0)
    engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 4)
    engine.scheduler.preempt("a")
    assert engine.launch().num_tokens == 14
    engine.run()
    stats = engine.scheduler.stats
    assert (stats.num_saved_tokens, stats.num_restored_tokens) == (0, 0)
    assert stats.num_recomputed_tokens == 13


def test_only_what_a_result_has_confirmed_is_saved(toy_engine):
    """Two chunks of 4 are in flight when it is preempted, and one has arrived."""
    engine = engine_with(toy_engine, depth=3, long_prefill=4, budget=4)
    request = engine.add("a", list(range(17)), max_tokens=3)
    for _ in range(3):
        engine.launch()
    engine.land()
    assert (request.num_confirmed_tokens, request.num_computed_tokens) == (4, 12)
    engine.scheduler.preempt("a")
    assert request.saved.num_tokens == 4
    (row,) = engine.launch().new_rows
    assert row.num_computed_tokens == 4
    engine.run()
    engine.assert_like_reference()
    assert engine.scheduler.stats.num_recomputed_tokens == 0


def test_the_prefix_cache_comes_first(toy_engine):
    """Of 14 tokens it still has 2 blocks; the third was evicted, the last was never full."""
    engine = engine_with(toy_engine, prefix_caching=True)
    request = engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 5)
    assert request.num_cached_blocks == [3]
    evicted = request.blocks[0][2]
    engine.scheduler.preempt("a")
    engine.scheduler._kv._cache.remove(evicted)
    engine.scheduler._kv._pool.move_to_front(evicted)
    plan = engine.launch()
    (row,) = plan.new_rows
    assert len(plan.offloads) == 4
    assert row.restores.page_ids.tolist() == plan.offloads.page_ids[2:].tolist()
    assert row.restores.block_ids.tolist() == row.block_ids[0][2:].tolist()
    assert row.num_computed_tokens == 14
    engine.land()
    assert request.num_cached_blocks == [3], "what was restored can be hit after a result"
    stats = engine.scheduler.stats
    assert (stats.num_saved_tokens, stats.num_restored_tokens, stats.num_cache_hits) == (14, 6, 8)
    engine.run()
    engine.assert_like_reference()


def test_pages_are_let_go_when_the_cache_has_more(toy_engine):
    """Somebody else has computed the same prompt meanwhile, and more of it."""
    engine = engine_with(toy_engine, prefix_caching=True, policy="priority", rows=1, budget=4)
    first = engine.add("a", list(range(16)), max_tokens=2)
    engine.tick()
    engine.tick()
    assert first.num_confirmed_tokens == 4
    engine.scheduler.preempt("a")
    assert first.saved.num_tokens == 4
    engine.add("b", list(range(16)), max_tokens=1, priority=-1)
    run_to_tokens(engine, "b", 1)
    plan = engine.launch()
    (row,) = plan.new_rows
    assert (row.num_computed_tokens, len(row.restores)) == (12, 0)
    assert first.saved is None
    engine.run()
    engine.assert_like_reference()


def test_a_full_host_pool_takes_nothing(toy_engine):
    engine = engine_with(toy_engine, host_pages=5)
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=12)
    run_to_tokens(engine, "b", 4)
    engine.scheduler.preempt("a")
    engine.scheduler.preempt("b")
    saved = [engine.requests[name].saved is not None for name in "ab"]
    assert saved == [True, False], "4 pages are taken, and 1 is not enough"
    engine.run()
    engine.assert_like_reference()


def test_costs_choose_per_request(toy_engine):
    """Two pages cost more than 5 tokens, and four less than 13."""
    costs = MoveCosts(per_token=1.0, per_page=2.0, per_move=3.0)
    engine = engine_with(toy_engine, move_costs=costs)
    engine.add("short", PROMPT[:3], max_tokens=12)
    engine.add("long", PROMPT, max_tokens=12)
    run_to_tokens(engine, "long", 3)
    engine.scheduler.preempt("short")
    engine.scheduler.preempt("long")
    assert engine.requests["short"].saved is None
    assert engine.requests["long"].saved.num_tokens == 12
    engine.run()
    engine.assert_like_reference()
    stats = engine.scheduler.stats
    assert (stats.num_restored_tokens, stats.num_recomputed_tokens) == (12, 5)


@pytest.mark.parametrize("is_planned", [False, True])
def test_an_abort_lets_go_of_the_pages(toy_engine, is_planned):
    engine = engine_with(toy_engine, rows=1, policy="priority")
    engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 4)
    engine.add("urgent", PROMPT, max_tokens=3, priority=-1)
    engine.scheduler.preempt("a")
    if is_planned:
        assert len(engine.launch().offloads) == 4
    engine.scheduler.abort("a")
    assert engine.scheduler._kv.host.num_free == 40
    if not is_planned:
        assert len(engine.launch().offloads) == 0
    engine.run()


def test_preempted_before_its_first_result_it_keeps_its_pages(toy_engine):
    """What its new blocks hold nobody has confirmed."""
    engine = engine_with(toy_engine, depth=3)
    request = engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 4)
    while engine.in_flight:
        engine.land()
    engine.scheduler.preempt("a")
    saved = request.saved
    engine.launch()
    engine.scheduler.preempt("a")
    assert request.saved is saved
    plan = engine.launch()
    assert len(plan.offloads) == 0
    assert plan.new_rows[0].num_computed_tokens == saved.num_tokens
    engine.land()
    assert request.saved is saved, "that was the result of the life before"
    engine.land()
    assert request.saved is None
    engine.run()
    engine.assert_like_reference()


def test_a_window_saves_what_it_still_sees(toy_engine):
    engine = engine_with(toy_engine, block_sizes=(4, 4), windows=(None, 5))
    request = engine.add("a", PROMPT, max_tokens=30)
    run_to_tokens(engine, "a", 10)
    assert request.num_passed_blocks == [0, 3]
    engine.scheduler.preempt("a")
    assert request.saved.first == (0, 3)
    assert [len(pages) for pages in request.saved.pages] == [5, 2]
    (row,) = engine.launch().new_rows
    assert len(row.restores) == 7
    assert row.block_ids[1][:3].tolist() == [0, 0, 0]
    engine.run()
    engine.assert_like_reference()


def test_prompt_logprobs_do_not_lose_rows(toy_engine):
    """The cache may not be read past the rows that are known; what was saved has rows."""
    engine = engine_with(toy_engine, budget=4)
    request = engine.add("a", PROMPT, max_tokens=4, prompt_logprobs=0)
    for _ in range(4):
        engine.tick()
    awaited = request.awaited_prompt_logprobs
    assert (request.num_confirmed_tokens, awaited.num_known) == (8, 0)  # the toy makes no rows
    engine.scheduler.preempt("a")
    assert engine.launch().new_rows[0].num_computed_tokens == 0
    assert request.saved is None, "of no use"
    awaited.num_known = 4
    engine.land()
    engine.scheduler.preempt("a")
    assert engine.launch().new_rows[0].num_computed_tokens == 4


@pytest.mark.parametrize("which", ["save", "restore"])
def test_a_failed_step_takes_its_copies_along(toy_engine, which):
    engine = engine_with(toy_engine, depth=3, rows=1, policy="priority")
    request = engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 4)
    while engine.in_flight:
        engine.land()
    engine.add("b", PROMPT, max_tokens=1, priority=-1)
    engine.scheduler.preempt("a")
    num_saved = request.saved.num_tokens
    saving = engine.launch()  # of b alone; after it b is drained, and a gets the row
    restoring = engine.launch()
    assert len(saving.offloads) == 4
    assert len(restoring.new_rows[0].restores) == 4
    engine.device.broken = {(saving if which == "save" else restoring).step}
    for memory in (*engine.device.kv, *(page[0] for page in engine.device.pages.values())):
        memory += 1  # what the step has done is garbage after all
    engine.run()
    if which == "save":
        assert engine.ended == {"a": "length", "b": "error"}
        assert engine.scheduler.stats.num_recomputed_tokens == num_saved
        engine.assert_like_reference("a")
    else:
        assert engine.ended["a"] == "error"
        assert isinstance(request.error, RequestFailed)


def test_resetting_the_cache_forgets_saved_tokens(toy_engine):
    engine = engine_with(toy_engine)
    engine.add("a", PROMPT, max_tokens=12)
    run_to_tokens(engine, "a", 4)
    engine.scheduler.preempt("a")
    assert engine.scheduler.reset_prefix_cache()
    assert engine.launch().new_rows[0].num_computed_tokens == 0
    engine.run()
    engine.assert_like_reference()
