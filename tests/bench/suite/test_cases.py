"""Which cases are meant, and what is told of their timings."""

from __future__ import annotations

import pytest

from pelton.bench.suite.cases import SUBJECTS, Case, chosen
from pelton.errors import ConfigError


def _meant(device, only):
    return {s.name: ([c.name for c in s.cases], start) for s, start in chosen(device, only)}


def test_all_by_default():
    assert [s.name for s, _ in chosen("cuda", None)] == [
        s.name for s in SUBJECTS if s.device == "cuda"
    ]
    starts = {s.name: start for s, start in chosen("cuda", None)}
    assert starts["qwen3-8b"]
    assert not starts["8b-32k"]


def test_only():
    assert _meant("cuda", "qwen3-8b/decode1, prefill") == {
        "qwen3-0.6b": (["prefill"], False),
        "qwen3-8b": (["decode1", "prefill"], False),
        "qwen3-30b-a3b": (["prefill"], False),
        "8b-invariant": (["prefill"], False),
    }
    names, start = _meant("cuda", "qwen3-8b")["qwen3-8b"]
    assert "decode256" in names
    assert start
    assert _meant("cuda", "qwen3-8b/start") == {"qwen3-8b": ([], True)}


def test_what_is_refused():
    with pytest.raises(ConfigError, match="only='8b-32k/start' is no case"):
        chosen("cuda", "8b-32k/start")
    with pytest.raises(ConfigError, match=r"only='decode2' is no case.*decode"):
        chosen("cuda", "decode2")
    with pytest.raises(ConfigError, match="device='xpu' has no suite; there is one of cpu, cuda"):
        chosen("xpu", None)


def test_a_decode_case_is_what_the_tokens_after_the_first_take():
    case = Case("decode1", "decode", 1, 128, 5)
    values = case.values([(1.0, 2.0), (1.0, 9.0), (0.5, 3.0)])
    value, samples = values["decode1"]
    assert value == (3.0 - 1.0) / 4 * 1e3, "of the medians, each by itself"
    assert samples == [250.0, 2000.0, 625.0]
    assert values["first_token"] == (1000.0, [1000.0, 1000.0, 500.0])
    assert case.rows() == [("decode1", "ms"), ("first_token", "ms")]


def test_a_served_case_has_three_figures():
    case = Case("serve8", "serving", 8, 128, 16)
    values = case.values([(0.01, 0.2, 90.0), (0.03, 0.1, 100.0), (0.02, 0.4, 80.0)])
    assert values["serve8_gap99"] == (20.0, [10.0, 30.0, 20.0])
    assert values["serve8_first"] == (200.0, [200.0, 100.0, 400.0])
    assert values["serve8_rate"] == (90.0, [90.0, 100.0, 80.0])
    assert case.rows() == [
        ("serve8_gap99", "ms"), ("serve8_first", "ms"), ("serve8_rate", "tokens/s")
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "tokens"), [("total", 60), ("output", 20), ("prefill", 40)])
def test_tokens_per_second(kind, tokens):
    case = Case("x", kind, 2, 20, 10)
    assert case.values([(0.0, 4.0)]) == {"x": (tokens / 4, [tokens / 4])}
    assert case.rows() == [("x", "tokens/s")]
    assert not case.has_first
