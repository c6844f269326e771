"""Policies are keys; lists sorted by key are the only queues."""

from __future__ import annotations

import pytest

from pelton.config.params import SamplingParams
from pelton.core import policy
from pelton.core.request import Request
from pelton.errors import ConfigError, IntegrityError


def request(arrival, priority=0):
    made = Request(f"r{arrival}", [1], SamplingParams(), priority=priority)
    made.arrival = arrival
    return made


def order(name, requests):
    queue = []
    for item in requests:
        item.key = (policy.get_policy(name)(item), item.arrival)
        policy.insert(queue, item)
    return queue


def test_orders():
    requests = [request(2, 0), request(0, 5), request(1, 0)]
    assert [r.arrival for r in order("fcfs", requests)] == [0, 1, 2]
    assert [r.arrival for r in order("priority", requests)] == [1, 2, 0]


def test_remove_takes_exactly_one():
    requests = [request(i) for i in range(5)]
    queue = order("fcfs", requests)
    policy.remove(queue, requests[3])
    assert [r.arrival for r in queue] == [0, 1, 2, 4]
    with pytest.raises(IntegrityError):
        policy.remove(queue, requests[3])


def test_register(monkeypatch, toy_engine):
    monkeypatch.setattr(policy, "POLICIES", dict(policy.POLICIES))
    policy.register("shortest", lambda r: (r.prompt_len,))
    engine = toy_engine(policy="shortest", rows=1)
    for i, length in enumerate([9, 4, 6, 4]):
        engine.add(f"r{i}", [1] * length, max_tokens=1)
    engine.run()
    assert list(engine.ended) == ["r1", "r3", "r2", "r0"]
    with pytest.raises(ConfigError, match="'fcfs' exists"):
        policy.register("fcfs", policy.fcfs)
