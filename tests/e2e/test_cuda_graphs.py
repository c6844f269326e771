"""CUDA graphs on an NVIDIA GPU. Run on the lent machine."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
from e2e.test_cuda import HYBRID
from support.dense_attention import NAME
from support.drafters import ngram_drafts
from support.families import tiny_model
from support.plain import greedy, logprobs_of, seeded
from support.tiny import TinyEngine, oracle_greedy, prompts_of, tiny_llama
from torch.profiler import ProfilerActivity, profile

from pelton import LLM
from pelton.config.graphs import GraphsConfig
from pelton.config.params import SamplingParams
from pelton.device.made import Made

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
    engine = recorded(backend, speculation=ngram_drafts(num_drafts))
    prompts = [p * 2 for p in PROMPTS]
    assert engine.generate(prompts) == [oracle_greedy(tiny_llama(), p, 12) for p in prompts]


FAMILIES = {
    "Llama": {},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Gemma3Text": {},
    "GraniteMoeHybrid": HYBRID,
}


# Experts with batch_invariant are torch's kernels, which have no memory given to them.
@pytest.mark.parametrize(
    ("family", "is_invariant"),
    [(f, i) for f in FAMILIES for i in (False, True) if (f, i) != ("Qwen3Moe", True)],
)
def test_recordings_make_nothing_but_launches(family, is_invariant):
    """No memory, no thread, no file; nor, as far as the driver is asked, a handle."""
    engine = TinyEngine(
        tiny_model(family, **FAMILIES[family]),
        device="cuda",
        attention_backend="triton_invariant" if is_invariant else "triton",
        batch_invariant=is_invariant,
        graphs=GRAPHS,
    )
    left = len(engine.worker._assembled.executor.unrecorded())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        while engine.loop.idle():
            pass
    assert left > len(engine.worker._assembled.executor.unrecorded()) == 0
    assert engine.device.made_in_recordings == Made()
    calls = {event.name() for event in profiler.profiler.kineto_results.events()}
    assert any("BeginCapture" in call for call in calls), "the driver's calls are seen"
    made = ("Malloc", "HostAlloc", "StreamCreate", "EventCreate", "ModuleLoad", "LibraryLoad")
    assert not {call for call in calls if call.startswith("cu") and any(m in call for m in made)}


def test_another_thread_works_in_the_same_queue():
    engine = recorded()
    found: list[list[list[int]]] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate(PROMPTS)))
    thread.start()
    thread.join()
    assert found == [[oracle_greedy(tiny_llama(), p, 12) for p in PROMPTS]]


@pytest.mark.parametrize("backend", ["triton", "triton_invariant"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_recurrent_layers(num_drafts, backend):
    """Twice, so that the second time checkpoints of states are hit."""
    folder = tiny_model("GraniteMoeHybrid", **HYBRID)
    engine = TinyEngine(
        folder,
        device="cuda",
        attention_backend=backend,
        batch_invariant=backend.endswith("invariant"),
        graphs=GRAPHS,
        speculation=ngram_drafts(num_drafts),
    )
    prompts = [p * 2 for p in PROMPTS]
    expected = [oracle_greedy(folder, p, 12) for p in prompts]
    for _ in range(2):
        assert engine.generate(prompts) == expected
    executor = engine.worker._assembled.executor
    assert executor.num_replayed > 10
    assert not executor.unrecorded()


def logprobs(graphs: GraphsConfig, **changes) -> list:
    engine = TinyEngine(
        tiny_llama(),
        device="cuda",
        attention_backend="triton_invariant",
        batch_invariant=True,
        graphs=graphs,
        **changes,
    )
    names = [engine.add(prompt, greedy(12, logprobs=3)) for prompt in PROMPTS]
    engine.run()
    return [logprobs_of(engine, name) for name in names]


def test_batch_invariant_is_bit_for_bit():
    """Launched, replayed, padded, in chunks and alone."""
    expected = logprobs(GraphsConfig())
    assert logprobs(GRAPHS) == expected
    assert logprobs(GraphsConfig(decode_sizes=(4,), token_sizes=(64,))) == expected
    assert logprobs(GRAPHS, long_prefill_token_threshold=3, max_steps_in_flight=3) == expected
    assert logprobs(GRAPHS, max_num_seqs=1) == expected


def test_what_is_measured_is_kept_to():
    """The whole engine, with a cache as large as it may be: what it holds in the end is no more
    than its share, and no kernel comes late."""
    llm = LLM(str(tiny_llama()), device="cuda", gpu_memory_utilization=0.95, max_num_seqs=64)
    memory = llm.config.memory
    assert memory is not None
    params = SamplingParams(temperature=0.7, max_tokens=20, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in prompts_of([5, 40, 90] * 20)]
    many: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9, "logprobs": 3},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.05},
        {"top_k": 90, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
        {"temperature": 0.0, "logit_bias": {5: 1.0}, "min_tokens": 2, "logprobs": 0},
    ]
    for options in many:
        llm.generate(prompts, dataclasses.replace(params, **options), use_tqdm=False)
    while llm._loop.idle():
        pass
    for options in many:
        llm.generate(prompts, dataclasses.replace(params, **options), use_tqdm=False)
    # Of this process alone: others use the GPU, too.
    held = memory.weights + memory.activations + memory.graphs + memory.kv
    assert torch.cuda.memory_reserved() <= held
    assert llm._worker.late_compiles.names == []
    llm.close()
