"""The short invariance list for every family: company, chunks, prefix hits, preemption, devices.

Compared with the plain engine (alone, reference attention, depth 1, no prefix cache).
"""

from __future__ import annotations

from typing import Any

import pytest
from support.encoders import ARCHITECTURES
from support.families import tiny_model
from support.plain import KINDS, greedy, logprobs_of, plain_tokens, seeded
from support.tiny import TinyEngine, prompts_of

from pelton.config.speculation import SpeculationConfig
from pelton.models.table import MODELS

HALF = (("rope_type", "default"), ("rope_theta", 500.0), ("partial_rotary_factor", 0.5))
GEMMA = {"initializer_range": 0.2, "sliding_window": 128, "query_pre_attn_scalar": 16}
LAYERS = ("sliding_attention", "full_attention")
GRANITE_LAYERS = ("linear_attention", "full_attention", "linear_attention")
GRANITE = {
    "num_hidden_layers": 3,
    "layer_types": GRANITE_LAYERS,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 5,
    "mamba_n_groups": 2,
    "attention_multiplier": 0.25,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma2ForCausalLM": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "Gemma3ForCausalLM": ("Gemma3Text", {**GEMMA, "sliding_window": 9, "layer_types": LAYERS}),
    "GraniteForCausalLM": ("Granite", {"attention_multiplier": 0.25}),
    "GraniteMoeHybridForCausalLM": (
        "GraniteMoeHybrid",
        {**GRANITE, "num_local_experts": 5, "intermediate_size": 20},
    ),
    "MinistralForCausalLM": ("Ministral", {"sliding_window": 9, "layer_types": LAYERS}),
    "MistralForCausalLM": ("Mistral", {"sliding_window": 9}),
    "Olmo2ForCausalLM": ("Olmo2", {}),
    "OlmoeForCausalLM": (
        "Olmoe",
        {
            "hidden_size": 64,
            "intermediate_size": 20,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "Phi3ForCausalLM": ("Phi3", {"hidden_size": 64, "rope_parameters": HALF}),
    "Qwen2ForCausalLM": ("Qwen2", {"hidden_size": 64}),
    "Qwen3ForCausalLM": ("Qwen3", {}),
    "GptOssForCausalLM": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "sliding_window": 9,
            "swiglu_limit": 1.0,
        },
    ),
    "Qwen3MoeForCausalLM": (
        "Qwen3Moe",
        {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2},
    ),
}
BACKENDS = {
    "torch": {"attention_backend": "torch"},
    "invariant": {"attention_backend": "invariant", "batch_invariant": True},
}
PROMPTS = prompts_of([1, 8, 21, 37], seed=11)

on_both = pytest.mark.parametrize("backend", BACKENDS)
of_every_family = pytest.mark.parametrize("family", FAMILIES)


def test_every_family_is_here():
    """Llama has the whole list, in test_invariance.py."""
    assert {"LlamaForCausalLM", *FAMILIES, *ARCHITECTURES} == set(MODELS)


def folder_of(family: str) -> Any:
    name, overrides = FAMILIES[family]
    return tiny_model(name, **overrides)


def engine_of(family: str, backend: str, **changes: Any) -> TinyEngine:
    return TinyEngine(folder_of(family), **{**BACKENDS[backend], **changes})


def check_all(family: str, engine: TinyEngine) -> None:
    """All prompts, greedy and seeded, together."""
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        for make in KINDS.values():
            name = engine.add(prompt, make(), seed=index)
            expected[name] = plain_tokens(prompt, make(), seed=index, folder=folder_of(family))
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


@on_both
@of_every_family
def test_company(family, backend):
    check_all(family, engine_of(family, backend, max_num_seqs=8, num_blocks=300))


@on_both
@of_every_family
def test_chunks(family, backend):
    for chunk in (1, 3, 16):
        check_all(family, engine_of(family, backend, long_prefill_token_threshold=chunk))


@on_both
@of_every_family
def test_prefix_hits(family, backend):
    engine = engine_of(family, backend, device="queued")
    for hit in (11, 12, 13):
        assert engine.loop.scheduler.reset_prefix_cache()
        engine.add(PROMPTS[3][:hit], greedy(1))
        engine.run()
        name = engine.add(PROMPTS[3], seeded(), seed=4)
        outcome = engine.run()[name]
        assert outcome.request.num_cached_tokens == hit // 4 * 4
        expected = plain_tokens(PROMPTS[3], seeded(), seed=4, folder=folder_of(family))
        assert outcome.token_ids == expected


@on_both
@of_every_family
def test_preemption(family, backend):
    for k in (2, 6, 9):
        engine = engine_of(family, backend, device="queued", long_prefill_token_threshold=7)
        engine.add(PROMPTS[1], greedy(9))
        name = engine.add(PROMPTS[2], seeded(), seed=5)
        for _ in range(k):
            engine.step()
        assert engine.loop.scheduler.preempt(name)
        expected = plain_tokens(PROMPTS[2], seeded(), seed=5, folder=folder_of(family))
        assert engine.run()[name].token_ids == expected, k


@on_both
@of_every_family
def test_fake_device(family, backend):
    check_all(family, engine_of(family, backend, device="fake", max_steps_in_flight=3))


@on_both
@of_every_family
def test_ngram_drafts(family, backend):
    """Few tokens are allowed, so that some drafts stand and others fall."""
    speculation = SpeculationConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
    )
    engine = engine_of(family, backend, device="queued", speculation=speculation)
    expected = {}
    for index, make in enumerate(KINDS.values()):
        params = make(allowed_token_ids=(5, 6))
        name = engine.add(PROMPTS[2], params, seed=index)
        expected[name] = plain_tokens(PROMPTS[2], params, seed=index, folder=folder_of(family))
    outcomes = engine.run()
    assert {name: outcomes[name].token_ids for name in expected} == expected
    stats = engine.loop.scheduler.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0


@of_every_family
def test_batch_invariant_is_bitwise(family):
    """Log-probabilities as exact floats: alone, and in chunks among others."""

    def exact(others: int, **changes: Any) -> list[tuple[Any, ...]]:
        engine = engine_of(family, "invariant", max_num_seqs=8, num_blocks=300, **changes)
        for index, prompt in enumerate(prompts_of(range(3, 3 + others), seed=8)):
            engine.add(prompt, seeded(20), seed=index)
        name = engine.add(PROMPTS[3], greedy(logprobs=3), seed=4)
        engine.run()
        return logprobs_of(engine, name)

    alone = exact(0)
    assert len(alone) == 12
    assert exact(7) == alone
    assert exact(5, long_prefill_token_threshold=3) == alone
