"""Requests that yield no tokens: they end with their prompt."""

from __future__ import annotations

import pytest

from pelton.core.plan import NAN_POOLED
from pelton.core.request import RequestStatus
from pelton.errors import RequestError, RequestFailed

METHODS = ("last", "mean", "all")


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + 3 * i + i // 7) % 50 for i in range(length)]


def test_a_row_is_free_when_its_last_token_is_scheduled(toy_engine):
    """No token is sampled for it, no placeholder reserved; its blocks wait for the result."""
    engine = toy_engine(rows=1, budget=5, prefix_caching=False)
    first = engine.pool("a", prompt(8))
    engine.pool("b", prompt(3, 9))
    plans = [engine.launch() for _ in range(2)]
    assert [plan.num_scheduled_tokens.tolist() for plan in plans] == [[5], [3]]
    assert not any(plan.samples.any() for plan in plans)
    assert first.status is RequestStatus.DRAINING
    assert (first.num_placeholders, first.num_in_flight_min) == (0, 0)
    engine.land()
    assert not engine.ended
    plan = engine.launch()
    assert plan.finished == [plans[0].refs[0]]
    assert [row.request_id for row in plan.new_rows] == ["b"]
    engine.run()
    engine.assert_like_reference()


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_may_fill_the_context_and_the_pool(toy_engine, method):
    engine = toy_engine(max_model_len=24, num_blocks=7, long_prefill=5)
    engine.pool("full", prompt(24), method)
    engine.run()
    engine.assert_like_reference()
    with pytest.raises(RequestError, match="has 25 tokens; with max_model_len=24 it may have 24"):
        engine.pool("long", prompt(25), method)
    with pytest.raises(RequestError, match="may have 23"):
        engine.add("answers", prompt(24))
    small = toy_engine(max_model_len=24, num_blocks=6)
    with pytest.raises(RequestError, match="need 6 KV blocks"):
        small.pool("full", prompt(24), method)


def test_only_the_last_token_does_without_the_others(toy_engine):
    engine = toy_engine(num_blocks=40)
    for name, method, hits in (
        ("a", "mean", 0),
        ("b", "last", 8),
        ("c", "all", 0),
        ("d", "mean", 0),
    ):
        request = engine.pool(name, prompt(11), method)
        engine.drain()
        assert request.num_cached_tokens == hits
    engine.add("e", prompt(11), max_tokens=3)
    engine.drain()
    assert engine.requests["e"].num_cached_tokens == 8
    engine.run()
    engine.assert_like_reference()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("after", [1, 2, 3])
def test_preempted_and_resumed(toy_engine, method, after):
    engine = toy_engine(long_prefill=3, num_blocks=40)
    engine.pool("a", prompt(14), method)
    for _ in range(after):
        engine.tick()
    assert engine.scheduler.preempt("a")
    engine.run()
    engine.assert_like_reference()


@pytest.mark.parametrize("method", METHODS)
def test_an_aborted_one_is_gone(toy_engine, method):
    engine = toy_engine(long_prefill=3)
    engine.pool("a", prompt(8), method)
    engine.pool("b", prompt(8, 5), method)
    engine.launch()
    assert engine.scheduler.abort("a")
    engine.run()
    assert "a" not in engine.ended
    engine.assert_like_reference("b")


def test_an_aborted_one_whose_end_is_in_flight(toy_engine):
    engine = toy_engine()
    engine.pool("a", prompt(8))
    engine.launch()
    assert not engine.scheduler.preempt("a")
    assert engine.scheduler.abort("a")
    engine.run()
    assert not engine.ended


@pytest.mark.parametrize("at", [0, 3, 6])
def test_numbers_that_are_none_end_the_request_alone(toy_engine, at):
    engine = toy_engine(long_prefill=3)
    engine.pool("a", prompt(8), "all")
    engine.pool("b", prompt(8, 5), "all")
    engine.device.faults["a", at] = NAN_POOLED
    engine.run()
    assert engine.ended == {"a": "error", "b": "stop"}
    error = engine.requests["a"].error
    assert isinstance(error, RequestFailed)
    assert "hidden states are not finite" in str(error)
    engine.assert_like_reference("b")


def test_a_failed_step_ends_those_in_it(toy_engine):
    engine = toy_engine(rows=1)
    engine.pool("a", prompt(8))
    engine.pool("b", prompt(8, 5))
    engine.device.broken.add(0)
    engine.run()
    assert engine.ended == {"a": "error", "b": "stop"}
    engine.assert_like_reference("b")
