"""Metrics of requests, by hand."""

from __future__ import annotations

import pytest

from pelton.bench.outcomes import Outcome, distribution, peak_concurrency, summarise

# Sent at 10; the role's chunk without tokens; 1 token at 11; 3 tokens at 11.6; 1 at 12.
ONE = Outcome(
    due=9.5,
    sent=10.0,
    end=12.0,
    chunks=[(10.5, 0), (11.0, 1), (11.6, 3), (12.0, 1)],
    num_prompt_tokens=7,
)


def test_one_request() -> None:
    assert ONE.num_tokens == 5
    assert ONE.ttft == 1.0
    assert ONE.e2e == 2.0
    assert ONE.tpot == pytest.approx(0.25)
    # Three tokens of one chunk share its gap, so that the mean is TPOT.
    assert ONE.itl == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert Outcome(0.0, sent=0.0, end=1.0, chunks=[(1.0, 1)]).tpot is None


def test_many_requests() -> None:
    late = Outcome(due=11.0, sent=11.0, end=14.0, chunks=[(13.0, 1), (14.0, 1)])
    failed = Outcome(due=12.0, sent=12.0, end=12.5, error="no")
    found = summarise([ONE, late, failed], [90], {"ttft": 1.5, "tpot": 0.3})
    assert found["completed"] == 2
    assert found["failed"] == 1
    assert found["duration_s"] == 4.0
    assert found["output_tokens_per_s"] == 7 / 4
    assert found["total_tokens_per_s"] == 14 / 4
    assert found["peak_output_tokens_per_s"] == 4  # the second from 11 to 12
    assert found["peak_concurrency"] == 2
    assert found["mean_concurrency"] == pytest.approx(5.5 / 4)
    assert found["max_lateness_s"] == 0.5
    assert found["goodput_share"] == pytest.approx(1 / 3)
    assert found["goodput_requests_per_s"] == 1 / 4
    assert found["latencies_s"]["ttft"]["median"] == 1.5
    assert found["latencies_s"]["ttft"]["p90"] == pytest.approx(1.9)


def test_one_end_makes_room_for_a_beginning() -> None:
    spans = [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]
    assert peak_concurrency([Outcome(0.0, sent=a, end=b) for a, b in spans]) == 2


def test_distribution() -> None:
    assert distribution([], [50]) is None
    assert distribution([1.0, 3.0], [50, 100]) == {
        "mean": 2.0,
        "median": 2.0,
        "std": 1.0,
        "p50": 2.0,
        "p100": 3.0,
    }
