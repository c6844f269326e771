"""CUDA graphs on an NVIDIA GPU. Run on the lent machine."""

from __future__ import annotations

import threading

import pytest
import torch
from support.dense_attention import NAME
from support.plain import greedy, seeded
from support.tiny import TinyEngine, oracle_greedy, prompts_of, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.config.speculation import SpeculationConfig

pytestmark = pytest.mark.gpu

GRAPHS = GraphsConfig(decode_sizes=(1, 2, 4), token_sizes=(16, 64))
PROMPTS = prompts_of([1, 7, 30, 16, 17, 15], seed=5)


@pytest.fixture(autouse=True)
def _needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


BACKENDS = [NAME, "triton"]


def recorded(backend: str = NAME, depth: int = 2, **changes) -> TinyEngine:
    return TinyEngine(
        tiny_llama(),
        device="cuda",
        attention_backend=backend,
        graphs=GRAPHS,
        max_steps_in_flight=depth,
        **changes,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_tokens_equal_transformers(depth, backend):
    engine = recorded(backend, depth)
    expected = [oracle_greedy(tiny_llama(), p, 12) for p in PROMPTS]
    assert engine.generate(PROMPTS) == expected
    assert engine.generate(PROMPTS[::-1]) == expected[::-1]
    executor = engine.worker._assembled.executor
    assert executor.num_replayed > 20
    assert not executor.unrecorded()


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeded_tokens_equal_the_cpu(backend):
    params = seeded()
    assert recorded(backend).generate(PROMPTS, params) == TinyEngine(tiny_llama()).generate(
        PROMPTS, params
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_step_waits_for_the_device(backend):
    engine = recorded(backend)
    names = [engine.add(prompt, make(12)) for prompt in PROMPTS for make in (greedy, seeded)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = engine.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(outcomes[name].error is None for name in names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_preempted_at_every_step(backend):
    for k in range(1, 12):
        engine = recorded(backend, long_prefill_token_threshold=3)
        name = engine.add(PROMPTS[2], greedy())
        other = engine.add(PROMPTS[3], greedy())
        for _ in range(k):
            engine.step()
        engine.loop.scheduler.preempt(name)
        outcomes = engine.run()
        assert outcomes[name].token_ids == oracle_greedy(tiny_llama(), PROMPTS[2], 12)
        assert outcomes[other].token_ids == oracle_greedy(tiny_llama(), PROMPTS[3], 12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts(num_drafts, backend):
    speculation = SpeculationConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
    )
    engine = recorded(backend, speculation=speculation)
    prompts = [p * 2 for p in PROMPTS]
    assert engine.generate(prompts) == [oracle_greedy(tiny_llama(), p, 12) for p in prompts]


def test_another_thread_works_in_the_same_queue():
    engine = recorded()
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(PROMPTS)))
    thread.start()
    thread.join()
    assert found == [[oracle_greedy(tiny_llama(), p, 12) for p in PROMPTS]]
