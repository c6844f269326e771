"""The whole engine on an NVIDIA GPU, by the references alone. Run on the lent machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.drafters import ngram_drafts
from support.embeds import FORMS, as_form, places_of
from support.families import tiny_model
from support.tiny import (
    TinyEngine,
    checkpoint_of,
    make_config,
    oracle_greedy,
    prompts_of,
    tiny_llama,
)

from pelton.config.graphs import GraphsConfig
from pelton.config.params import SamplingParams
from pelton.core.plan import StepPlan
from pelton.device import cuda
from pelton.device.cuda import CUDADevice
from pelton.device.table import STAGING_MODES
from pelton.worker.worker import Worker

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")


TRITON = ["triton", "triton_invariant"]


@pytest.mark.parametrize("backend", ["torch", "reference", "invariant", *TRITON])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_tokens_equal_transformers(backend, depth):
    folder = tiny_llama()
    engine = TinyEngine(
        folder,
        device="cuda",
        attention_backend=backend,
        batch_invariant=backend.endswith("invariant"),
        max_steps_in_flight=depth,
    )
    prompts = prompts_of([1, 7, 30, 16, 17, 15], seed=5)
    assert engine.generate(prompts) == [oracle_greedy(folder, p, 12) for p in prompts]


@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize(
    "changes",
    [
        {"long_prefill_token_threshold": 1},
        {"long_prefill_token_threshold": 3},
        {"max_num_batched_tokens": 16},
        {"max_num_seqs": 1},
        {"num_blocks": 24},  # some are preempted
        {"block_size": 16, "num_blocks": 32},
        {"speculation": ngram_drafts(3)},
    ],
    ids=str,
)  # fmt: skip
def test_triton_gives_the_same_tokens_however_it_is_run(changes, backend):
    """Twice, so that the second time prefixes are hit."""
    folder = tiny_llama()
    engine = TinyEngine(
        folder,
        device="cuda",
        attention_backend=backend,
        batch_invariant=backend.endswith("invariant"),
        **changes,
    )
    prompts = prompts_of([1, 3, 8, 12, 21, 37, 40, 41], seed=11)
    expected = [oracle_greedy(folder, p, 12) for p in prompts]
    for _ in range(2):
        assert engine.generate(prompts) == expected


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_no_step_waits_for_the_device(mode):
    """Every launch of a generation runs with synchronising calls forbidden; only the collection of
    results may wait, and it waits on an event. The driver's own waits, which torch does not see,
    would last until a kernel that sleeps has ended."""
    engine = TinyEngine(tiny_llama(), device=f"cuda/{mode}")
    device, execute = engine.device, engine.worker.execute

    def run() -> list[Any]:
        names = [
            engine.add(
                prompt, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, logprobs=3)
            )
            for prompt in prompts_of([5, 40, 90])
        ]
        names.append(engine.add(prompts_of([9])[0]))
        outcomes = engine.run()
        return [outcomes[name].error for name in names]

    def behind_a_sleeper(plan: StepPlan) -> Any:
        device.launch(torch.cuda._sleep, 50_000_000)  # 25 ms or more
        event = device.record_event()
        outcome = execute(plan)
        assert not event.is_done()
        return outcome

    run()  # what the first steps compile and allocate is there
    engine.worker.execute = behind_a_sleeper  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert run() == [None] * 4
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "graphs",
    [GraphsConfig(), GraphsConfig(decode_sizes=(1, 2, 4, 8), token_sizes=(16, 64))],
    ids=str,
)
def test_prompts_of_embeddings(depth, graphs):
    """Text, embeddings of the model's own and both in one prompt, in chunks and preempted: the
    text's tokens, and no launch waits for a copy."""
    folder = tiny_llama()
    engine = TinyEngine(
        folder,
        device="cuda",
        enable_prompt_embeds=True,
        max_steps_in_flight=depth,
        long_prefill_token_threshold=7,
        graphs=graphs,
    )
    prompts = prompts_of([37, 30, 21, 1], seed=5)
    given = [
        (prompt, as_form(folder, prompt, places_of(form, len(prompt))))
        for prompt in prompts
        for form in FORMS
    ]
    for _ in range(2):
        names = {engine.add(**one): prompt for prompt, one in given}
        torch.cuda.set_sync_debug_mode("error")
        try:
            for count in range(400):
                if not engine.loop.has_work():
                    break
                engine.step()
                if count % 9 == 8:
                    engine.loop.scheduler.preempt(list(names)[count % len(names)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for name, prompt in names.items():
            assert engine.outcomes[name].token_ids == oracle_greedy(folder, prompt, 12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_requests_go_to_pinned_memory_and_back(depth):
    """And no launch waits for a copy."""
    prompts = prompts_of([37, 30, 21], seed=5)
    engine = TinyEngine(
        tiny_llama(),
        device="cuda",
        max_steps_in_flight=depth,
        enable_prefix_caching=False,
        num_host_pages=40,
    )
    names = [engine.add(prompt) for prompt in prompts]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in range(200):
            if not engine.loop.has_work():
                break
            engine.step()
            if count % 7 == 6:
                for name in names:
                    engine.loop.scheduler.preempt(name)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, prompt in zip(names, prompts):
        assert engine.outcomes[name].token_ids == oracle_greedy(tiny_llama(), prompt, 12)
    stats = engine.loop.scheduler.stats
    assert stats.num_restored_tokens > 50
    assert stats.num_recomputed_tokens == 0


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_memory_that_the_gpu_reads_late_is_not_rewritten(mode):
    """Case 1: rows come and leave at every step, and the GPU is 5 ms behind before each of them, so
    the next steps are staged while it has not read this one's words."""
    engine = TinyEngine(tiny_llama(), device=f"cuda/{mode}", max_steps_in_flight=3)
    device, execute = engine.device, engine.worker.execute

    def behind_a_sleeper(plan: StepPlan) -> Any:
        device.launch(torch.cuda._sleep, 10_000_000)
        return execute(plan)

    engine.worker.execute = behind_a_sleeper  # type: ignore[method-assign]
    prompts = prompts_of([3, 17, 9, 30, 1, 22, 16, 5], seed=9)
    expected = {}
    for index, prompt in enumerate(prompts):
        max_tokens = 4 + index % 5
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        expected[engine.add(prompt, params)] = oracle_greedy(tiny_llama(), prompt, max_tokens)
        engine.step()
    outcomes = engine.run()
    assert {name: outcomes[name].token_ids for name in expected} == expected


@pytest.mark.parametrize("cold", [False, True], ids=["device", "cold"])
@pytest.mark.parametrize("mode", STAGING_MODES)
def test_the_ways_of_staging_give_the_same_tokens(mode, cold, monkeypatch):
    """With the token table in host memory, where the mode allows it, and on the device."""
    if cold:
        monkeypatch.setattr(cuda, "_COLD_SHARE", 2**60)  # no table is too small
    engine = TinyEngine(tiny_llama(), device=f"cuda/{mode}", max_steps_in_flight=3)
    assert isinstance(engine.device, CUDADevice)
    assert bool(engine.device.host_memory.host_bytes) == (cold and mode == "aliased")
    prompts = prompts_of([1, 7, 30, 16, 17, 15], seed=5)
    assert engine.generate(prompts) == [oracle_greedy(tiny_llama(), p, 12) for p in prompts]


def test_what_moving_costs():
    """Copies are worth it on this device, by its own measure."""
    config = make_config(tiny_llama(), num_host_pages=40)
    costs = Worker(config, checkpoint_of(tiny_llama()), device=CUDADevice()).move_costs
    assert costs.per_token > 0
    assert 0 < costs.per_page + costs.per_move < 1


def test_seeded_tokens_equal_the_cpu():
    params = SamplingParams(temperature=0.8, top_k=40, seed=11, max_tokens=12, ignore_eos=True)
    prompts = prompts_of([1, 7, 30, 16], seed=5)
    assert TinyEngine(tiny_llama(), device="cuda").generate(prompts, params) == TinyEngine(
        tiny_llama()
    ).generate(prompts, params)


MOE = {
    "qwen3": ("Qwen3Moe", {"moe_intermediate_size": 32, "num_experts": 9, "hidden_size": 64}),
    "gpt-oss": ("GptOss", {"num_local_experts": 9, "sliding_window": 9, "hidden_size": 64}),
}


@pytest.mark.parametrize("backend", ["torch", "invariant"])
@pytest.mark.parametrize("family", MOE)
def test_experts_greedy_tokens_equal_transformers(family, backend):
    name, overrides = MOE[family]
    folder = tiny_model(name, num_experts_per_tok=3, **overrides)
    invariant = backend == "invariant"
    engine = TinyEngine(folder, device="cuda", attention_backend=backend, batch_invariant=invariant)
    prompts = prompts_of([1, 7, 30, 16], seed=5)
    assert engine.generate(prompts) == [oracle_greedy(folder, p, 12) for p in prompts]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MOE)
def test_experts_do_not_wait_for_the_device(family, dtype):
    name, overrides = MOE[family]
    folder = tiny_model(name, num_experts_per_tok=3, **overrides)
    engine = TinyEngine(folder, device="cuda", dtype=dtype)
    assert engine.worker.model.layers[0].mlp.experts.kernel.names == ("few", "in_order")
    names = [engine.add(prompt) for prompt in prompts_of([5, 40, 90])]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = engine.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(outcomes[name].error is None for name in names)


HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ("linear_attention", "full_attention", "linear_attention"),
    "num_local_experts": 0,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "attention_multiplier": 0.25,
}


@pytest.mark.parametrize("backend", ["torch", "invariant", *TRITON])
@pytest.mark.parametrize("depth", [1, 3])
def test_recurrent_layers_greedy_tokens_equal_transformers(backend, depth):
    folder = tiny_model("GraniteMoeHybrid", **HYBRID)
    engine = TinyEngine(
        folder,
        device="cuda",
        attention_backend=backend,
        batch_invariant=backend.endswith("invariant"),
        max_steps_in_flight=depth,
    )
    prompts = prompts_of([1, 7, 30, 16, 17, 90], seed=5)
    assert engine.generate(prompts) == [oracle_greedy(folder, p, 12) for p in prompts]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_recurrent_layers_do_not_wait_for_the_device(num_drafts):
    folder = tiny_model("GraniteMoeHybrid", **HYBRID)
    engine = TinyEngine(folder, device="cuda", speculation=ngram_drafts(num_drafts))
    names = [engine.add(prompt * 2) for prompt in prompts_of([5, 20, 45])]
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcomes = engine.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(outcomes[name].error is None for name in names)
