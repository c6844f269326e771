"""Load of all kinds at once: what is not cancelled gets the answer that it gets alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.config.params import SamplingParams

GPU = {
    "device": "cuda",
    "attention_backend": "triton_invariant",
    "graphs": GraphsConfig(decode_sizes=(1, 2, 4, 8, 16, 24), token_sizes=(16, 64)),
}
CPU = {"device": "cpu", "attention_backend": "invariant"}
MAX_LEN = 128


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams
    seed: int


def draw_requests(num_requests: int, seed: int) -> list[Asked]:
    """Lengths from one token to all that fit; some prompts begin like others; greedy and seeded,
    with and without what else the sampler can do."""
    rng = random.Random(seed)
    beginnings = prompts_of([40, 17, 64], seed=seed)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.8},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 60},
        {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 0.0, "logit_bias": {5: 3.0, 17: -2.0}, "min_tokens": 1},
    ]
    found = []
    for index in range(num_requests):
        length = rng.choice((1, 2, 3, rng.randint(4, 20), rng.randint(4, 20), rng.randint(20, 90)))
        (prompt,) = prompts_of([length], seed=1000 + index)
        if rng.random() < 0.3:
            prompt = (rng.choice(beginnings) + prompt)[:90]
        max_tokens = rng.randint(1, min(30, MAX_LEN - len(prompt)))
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **rng.choice(options))
        found.append(Asked(prompt, params, seed=index))
    return found


def run_load(engine: TinyEngine, asked: list[Asked], seed: int) -> tuple[dict[int, list[int]], int]:
    """They come in bursts; now and then one is cancelled, and one that runs loses its row.

    Tokens of each request that was kept, by its index; and how many lost their row this way.
    """
    rng = random.Random(seed)
    num_preempted = 0
    names: list[str] = []
    cancelled: set[str] = set()

    def unfinished() -> list[str]:
        return [n for n in names if engine.outcomes[n].finish_reason is None and n not in cancelled]

    for _ in range(100_000):
        if len(names) < len(asked) and (rng.random() < 0.3 or not unfinished()):
            for one in asked[len(names) : len(names) + rng.randint(1, 12)]:
                names.append(engine.add(one.prompt, one.params, seed=one.seed))
        if rng.random() < 0.1 and (left := unfinished()):
            name = rng.choice(left)
            if engine.loop.abort(name):
                cancelled.add(name)
        if rng.random() < 0.1 and (left := unfinished()):
            num_preempted += engine.loop.scheduler.preempt(rng.choice(left))
        if len(names) == len(asked) and not engine.loop.has_work():
            break
        engine.step()
    engine.loop.scheduler.check_integrity()
    kept = {i: engine.outcomes[name] for i, name in enumerate(names) if name not in cancelled}
    odd = {i: (one.finish_reason, one.error) for i, one in kept.items()}
    odd = {i: how for i, how in odd.items() if how != ("length", None)}
    assert not odd, odd
    assert len(cancelled) >= len(asked) // 50
    return {i: one.token_ids for i, one in kept.items()}, num_preempted


def check(num_requests: int, dtype: str, **where: Any) -> None:
    asked = draw_requests(num_requests, seed=3)
    common = {"dtype": dtype, "batch_invariant": True, **where}
    # Four requests at full length would fill the pool.
    engine = TinyEngine(
        tiny_llama(), max_num_seqs=24, num_blocks=4 * MAX_LEN // 4, max_steps_in_flight=3, **common
    )
    found, num_asked_for = run_load(engine, asked, seed=4)
    num_preempted = engine.loop.scheduler.stats.num_preemptions
    assert num_asked_for >= num_requests // 50
    assert num_preempted - num_asked_for >= num_requests // 10, "by lack of memory"
    alone = TinyEngine(
        tiny_llama(),
        max_num_seqs=1,
        max_num_batched_tokens=MAX_LEN,
        max_steps_in_flight=1,
        enable_prefix_caching=False,
        **{**common, "graphs": GraphsConfig()},
    )
    for index, tokens in found.items():
        one = asked[index]
        name = alone.add(one.prompt, one.params, seed=one.seed)
        assert alone.run()[name].token_ids == tokens, (index, one)
    print(f"{len(found)} of {num_requests} answers kept, {num_preempted} preemptions: all equal")


def test_each_answer_is_that_of_the_request_alone():
    check(60, "float32", **CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(dtype):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    check(500, dtype, **GPU)
