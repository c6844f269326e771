"""What one subject's process does with its cases and its time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pelton.bench import measure
from pelton.bench.suite import child
from pelton.bench.suite.cases import Case
from pelton.bench.suite.child import Prompts, Request, Rounds

QUICK = Case("quick", "output", 2, 4, 3)
SLOW = Case("slow", "output", 3, 4, 10)
FAULTY = Case("faulty", "output", 7, 4, 3)


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    perf_counter = monotonic


class Side:
    """Takes a second for each token of a row; seven rows are too many."""

    def __init__(self, clock):
        self.clock, self.calls = clock, []

    def generate(self, prompts, output_len):
        if len(prompts) == 7:
            raise ValueError("seven")
        self.calls.append((prompts, output_len))
        self.clock.now += output_len
        return np.zeros((len(prompts), output_len), np.int32)


@pytest.fixture
def side(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(child, "time", clock)
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(child, "warm_up", lambda *args: None)
    return Side(clock)


def _told(side, cases, iterations, deadline):
    events = []
    Rounds(cases, iterations, deadline).run({"engine": side}, Prompts(100, 0), events.append)
    return events


def test_each_case_once_before_any_twice(side):
    events = _told(side, [QUICK, SLOW], 2, 1000)
    assert [e["case"] for e in events] == ["quick", "slow", "quick", "slow"]
    assert [e["timing"] for e in events] == [(0.0, 3), (0.0, 10)] * 2


def test_what_would_not_end_in_time_is_left_out(side):
    events = _told(side, [QUICK, SLOW], 3, 18)
    assert [e["case"] for e in events] == ["quick", "slow", "quick"], "13 + 3 <= 18, 16 + 10 > 18"


def test_without_time_nothing_runs(side):
    assert _told(side, [QUICK], 3, -1) == []


def test_a_case_that_fails_is_told_and_hurts_no_other(side):
    events = _told(side, [FAULTY, QUICK], 2, 1000)
    assert events[0] == {"case": "faulty", "side": "engine", "error": "ValueError: seven"}
    assert [e["case"] for e in events[1:]] == ["quick", "quick"]


def test_sides_take_turns(side):
    events = []
    other = Side(side.clock)
    Rounds([QUICK, FAULTY], 3, 1000).run(
        {"engine": side, "other": other}, Prompts(100, 0), events.append
    )
    quick = [e["side"] for e in events if e["case"] == "quick"]
    assert quick == ["engine", "other", "other", "engine", "engine", "other"]
    faulty = [e["side"] for e in events if e["case"] == "faulty"]
    assert faulty == ["engine", "other"], "not asked again"


def test_a_round_of_all_sides_must_fit(side):
    events = []
    Rounds([QUICK], 3, 11).run(
        {"engine": side, "other": Side(side.clock)}, Prompts(100, 0), events.append
    )
    assert len(events) == 2, "6 + 6 > 11"


def test_prompts_are_new_each_time(side):
    _told(side, [QUICK], 2, 1000)
    (first, _), (second, _) = side.calls
    assert first.shape == second.shape == (2, 4)
    assert (first != second).any()


def test_a_decode_case_runs_to_its_first_token_too(side):
    case = Case("d", "decode", 1, 4, 5)
    (event,) = _told(side, [case], 1, 1000)
    assert event["timing"] == (1, 5)
    assert [n for _, n in side.calls] == [1, 5]


def test_warm_up_covers_decode_and_prefill():
    side = Side(Clock())
    child.warm_up(side, Prompts(100, 0), Case("p", "prefill", 64, 4096, 1))
    child.warm_up(side, Prompts(100, 0), Case("d", "decode", 5, 4, 9))
    assert [(p.shape, n) for p, n in side.calls] == [((1, 4096), 1), ((5, 4), 8)]


def test_a_request_survives_the_pipe():
    request = Request(
        args={"device": "cpu"}, shape=None, cases=[QUICK, SLOW], iterations=3, deadline=1.5
    )
    assert Request.of(request.text()) == request
    json.loads(request.text())
