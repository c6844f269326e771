"""Taking turns, and what a side must return."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from pelton.bench import measure
from pelton.config.params import SamplingParams
from pelton.core.plan import Int32Array
from pelton.errors import EngineError


class Echo:
    """Repeats each row's first token."""

    def __init__(self, name: str = "", *, short: int = 0) -> None:
        self.name = name
        self.short = short

    def generate(self, prompts: Int32Array, output_len: int) -> Int32Array:
        return np.repeat(prompts[:, :1], output_len - self.short, axis=1)


def test_sides_alternate_and_swap_places() -> None:
    seen = []

    def once(side: Any) -> str:
        seen.append(side.name)
        return f"{side.name}{len(seen)}"

    samples = measure.alternate([Echo("a"), Echo("b")], once, num_warmup=2, num_iters=3)
    assert "".join(seen) == "ab" + "ba" + "ab" + "ba" + "ab"
    assert samples == [["a5", "a8", "a9"], ["b6", "b7", "b10"]]


def test_random_prompts_follow_the_seed_and_stay_in_the_vocabulary() -> None:
    prompts = measure.random_prompts(11, 5, 40, seed=3)
    assert prompts.dtype == np.int32
    assert prompts.shape == (5, 40)
    assert set(np.unique(prompts)) == set(range(11))
    np.testing.assert_array_equal(prompts, measure.random_prompts(11, 5, 40, seed=3))
    assert (prompts != measure.random_prompts(11, 5, 40, seed=4)).any()


def test_a_short_answer_is_no_measurement() -> None:
    prompts = measure.random_prompts(11, 2, 4, seed=0)
    assert measure.timed_generate(Echo(), prompts, 3) > 0
    with pytest.raises(EngineError, match="Asked for 2 x 3 tokens"):
        measure.timed_generate(Echo(short=1), prompts, 3)


class StubLLM:
    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.params: SamplingParams | None = None

    def generate(self, rows: list[Any], params: SamplingParams, use_tqdm: bool) -> list[Any]:
        self.params = params
        assert params.max_tokens is not None
        return [
            types.SimpleNamespace(
                error=self.error,
                outputs=[
                    types.SimpleNamespace(
                        token_ids=[row["prompt_token_ids"][0]] * params.max_tokens
                    )
                ],
            )
            for row in rows
        ]


def test_the_engine_is_asked_for_exactly_so_many_greedy_tokens() -> None:
    llm = StubLLM()
    ids = measure.EngineSide(llm).generate(np.asarray([[4, 5], [6, 7]], np.int32), 3)
    np.testing.assert_array_equal(ids, [[4, 4, 4], [6, 6, 6]])
    assert llm.params is not None
    assert llm.params.is_greedy
    assert llm.params.ignore_eos


def test_a_failed_request_stops_the_benchmark() -> None:
    with pytest.raises(EngineError, match="out of luck"):
        measure.EngineSide(StubLLM("out of luck")).generate(np.zeros((1, 2), np.int32), 1)
