"""`pelton bench latency` and `throughput`, whole, with a stub in the engine's place."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pelton.bench import latency, machine, measure, session, throughput, weights
from pelton.bench.options import LatencyOptions, ThroughputOptions
from pelton.config.cache import CacheConfig
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.model import GenerationDefaults, ModelConfig, RopeConfig
from pelton.config.params import SamplingParams
from pelton.config.scheduler import SchedulerConfig
from pelton.core.plan import Int32Array
from pelton.errors import ConfigError

CONFIG = EngineConfig(
    model=ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=20,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        rope=RopeConfig(rotary_dim=4, theta=1e4),
        tie_word_embeddings=True,
        attention_bias=False,
        mlp_bias=False,
        max_position=64,
        checkpoint_dtype="float32",
    ),
    generation=GenerationDefaults(),
    cache=CacheConfig(block_size=16, num_blocks=8, dtype="float32"),
    scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    dtype="float32",
    device="cpu",
    seed=0,
    max_model_len=64,
    attention_backend="reference",
    batch_invariant=False,
    num_threads=1,
    max_logprobs=20,
)


class Clock:
    """Stands still until a side has worked."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


class StubLLM:
    """Makes zeros, a quarter of a second each."""

    made: list[dict[str, Any]]

    def __init__(self, **args: Any) -> None:
        StubLLM.made.append(args)
        self.config = CONFIG
        self.start_times = {"weights": 0.5}

    def settle(self) -> None:
        pass

    def generate(self, rows: list[Any], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        CLOCK.now += 0.25 * (params.max_tokens or 0)
        completion = types.SimpleNamespace(token_ids=[0] * (params.max_tokens or 0))
        return [types.SimpleNamespace(error=None, outputs=[completion]) for _ in rows]


class PlainZeros:
    """The same as the baseline: `seconds` per token."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def generate(self, prompts: Int32Array, output_len: int) -> Int32Array:
        CLOCK.now += self.seconds * output_len
        return np.zeros((len(prompts), output_len), np.int32)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    StubLLM.made = []
    ceilings = machine.Ceilings(read_bytes_per_s=1e6, flops_per_s=1e6)
    monkeypatch.setattr(machine, "measure_ceilings", lambda device, dtype: ceilings)
    monkeypatch.setattr(weights, "load_plain_loop", lambda args, config: PlainZeros(0.5))
    monkeypatch.setattr(session, "LLM", StubLLM)
    monkeypatch.setattr(measure, "time", CLOCK)


def test_latency_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = LatencyOptions(
        input_len=3, output_len=5, batch_size=2, num_iters=5, baseline=True, json=str(path)
    )
    latency.run(EngineArgs(model="m", hf_token="hush"), options)
    assert "hush" not in path.read_text()
    result = json.loads(path.read_text())
    assert StubLLM.made[0]["max_num_seqs"] == 2, "the batch runs in step"
    assert set(result["sides"]) == {"engine", "baseline"}
    prefill, decode = (result["sides"]["engine"][phase] for phase in ("prefill", "decode_step"))
    assert prefill["samples_s"] == decode["samples_s"] == [0.25] * 5
    assert decode["tokens_per_s"]["median"] == 2 / 0.25
    assert decode["share_of_floor"] == result["floor_seconds"]["decode_step"] / 0.25
    assert prefill["tokens_per_s"]["median"] == 2 * 3 / 0.25
    assert prefill["share_of_floor"] == result["floor_seconds"]["prefill"] / 0.25
    assert result["ratios"]["prefill"]["pairs"] == [2.0] * 5, "a speed ratio, above 1 is faster"
    assert result["ratios"]["decode_step"]["median"] == 2.0
    assert result["options"] == dataclasses.asdict(options)
    assert result["start_seconds"] == {"weights": 0.5}
    text = capsys.readouterr().out
    for word in ("machine", "software", "command", "ceilings", "engine / plain loop", "tokens/s"):
        assert word in text


def test_decode_lost_in_noise_is_no_measurement() -> None:
    options = LatencyOptions(output_len=5, num_iters=1)
    with pytest.raises(ConfigError, match="raise output_len above 5"):
        latency.sample([PlainZeros(0.0)], CONFIG, options)


def test_prefill_alone_has_no_decode(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    latency.run(EngineArgs(), LatencyOptions(output_len=1, num_iters=1, json=str(path)))
    result = json.loads(path.read_text())
    assert set(result["sides"]["engine"]) == {"prefill"}
    assert "ratios" not in result


def test_a_batch_that_cannot_run_in_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=3 is less than batch_size=4"):
        latency.run(EngineArgs(max_num_seqs=3), LatencyOptions(batch_size=4))
    assert StubLLM.made == []


def test_throughput_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = ThroughputOptions(
        num_prompts=3, input_len=4, output_len=2, baseline=True, json=str(path)
    )
    throughput.run(EngineArgs(), options)
    result = json.loads(path.read_text())
    engine = result["sides"]["engine"]
    assert engine["output_tokens_per_s"]["median"] == 3 * 2 / 0.5
    assert engine["total_tokens_per_s"] == 3 * (2 + 4) / 0.5
    assert engine["requests_per_s"] == 3 / 0.5
    assert result["ratio"]["pairs"] == [2.0] * 5
    assert StubLLM.made[0]["max_num_seqs"] is None
    assert "output tokens/s" in capsys.readouterr().out
