"""`pelton bench`: what its flags hand to the benchmarks."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from pelton.bench.options import (
    LatencyOptions,
    ServingOptions,
    SpeculationOptions,
    ThroughputOptions,
)
from pelton.cli.main import main
from pelton.config.engine import EngineArgs


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineArgs, Any]]:
    """Puts recorders in the benchmarks' place."""
    seen: list[tuple[EngineArgs, Any]] = []
    for name in ("latency", "throughput", "speculation"):
        module = types.ModuleType(f"pelton.bench.{name}")
        module.run = lambda args, options: seen.append((args, options))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_latency(calls: list[tuple[EngineArgs, Any]]) -> None:
    words = "bench latency m --input-len 8 --batch-size 4 --load-format dummy --baseline --seed 3"
    assert main([*words.split(), "--json", "out.json"]) == 0
    args, options = calls[0]
    assert args == EngineArgs(model="m", load_format="dummy", enable_prefix_caching=False, seed=3)
    assert options == LatencyOptions(input_len=8, batch_size=4, baseline=True, json="out.json")


def test_throughput(calls: list[tuple[EngineArgs, Any]]) -> None:
    assert main("bench throughput --num-prompts 3 --enable-prefix-caching".split()) == 0
    args, options = calls[0]
    assert args == EngineArgs()
    assert options == ThroughputOptions(num_prompts=3)


def test_speculation(calls: list[tuple[EngineArgs, Any]]) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    words = ["bench", "speculation", "--prompt-file", "a.txt", "--speculative-config", config]
    assert main(words) == 0
    args, options = calls[0]
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 4}
    assert options == SpeculationOptions(prompt_file="a.txt")


def test_serve_has_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    module = types.ModuleType("pelton.bench.serving")
    module.run = seen.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert main("bench serve --url http://x --request-rate inf --goodput ttft:2".split()) == 0
    assert seen == [ServingOptions(url="http://x", goodput="ttft:2")]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "serve --url notaurl",
            "url='notaurl' is none of a server, which starts with http:// or https:// and a host; "
            "it is written as http://127.0.0.1:8000 or https://example.org/v1.",
        ),
        ("serve --request-rate 0", "request_rate must be above 0, got 0.0."),
        ("overhead --baseline", "baseline: here the other side is the engine alone; leave it out."),
        ("latency --batch-size 0", "batch_size must be at least 1, got 0."),
        ("latency --baseline --num-iters 4", "num_iters must be at least 5, got 4."),
        ("throughput --num-prompts 0", "num_prompts must be at least 1, got 0."),
    ],
)
def test_impossible_options(
    words: str,
    sentence: str,
    calls: list[tuple[EngineArgs, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", *words.split()]) == 2
    assert capsys.readouterr().err == f"pelton: {sentence}\n"
    assert calls == []
