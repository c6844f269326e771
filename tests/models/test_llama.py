"""Llama's arithmetic against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
import torch
from support.families import engine_logits
from support.tiny import (
    TinyEngine,
    assert_greedy,
    make_config,
    oracle_logits,
    prompts_of,
    tiny_llama,
)

from pelton.device.native.library import library
from pelton.layers.rope import inverse_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd head": {"head_dim": 24, "hidden_size": 40},
    "linear rope": {"rope": (("rope_type", "linear"), ("factor", 4.0), ("rope_theta", 10000.0))},
    "llama3 rope": {"rope": tuple(LLAMA3.items())},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": {"rope_theta": 500.0},
}


@pytest.mark.parametrize("backend", ["torch", "reference", "invariant"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    folder = tiny_llama(**VARIANTS[variant])
    is_invariant = backend == "invariant"
    engine = TinyEngine(folder, attention_backend=backend, batch_invariant=is_invariant)
    (ids,) = prompts_of([45], seed=3)
    expected = oracle_logits(folder, ids)
    torch.testing.assert_close(engine_logits(engine, ids), expected, rtol=1e-4, atol=2e-4)
    prompts = prompts_of([1, 7, 30], seed=5)
    engine = TinyEngine(folder, attention_backend=backend, batch_invariant=is_invariant)
    assert_greedy(folder, prompts, engine.generate(prompts), 12)


def test_bfloat16_logits_are_near_float32():
    folder = tiny_llama(initializer_range=0.1)
    engine = TinyEngine(folder, dtype="bfloat16")
    (ids,) = prompts_of([40])
    expected = oracle_logits(folder, ids)
    error = (engine_logits(engine, ids).float() - expected).norm() / expected.norm()
    assert error < 0.03


def test_llama3_frequencies_equal_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    folder = tiny_llama(rope=tuple(LLAMA3.items()))
    config = LlamaConfig.from_pretrained(folder)
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    actual = inverse_frequencies(make_config(folder).model.rope)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_weight_is_in_memory_once(is_tied):
    model = TinyEngine(tiny_llama(tie_word_embeddings=is_tied)).worker.model
    assert model.embedding.weight.tensor.numel() == (0 if is_tied else 1000 * 48)
    assert model.output.weight.tensor.numel() == 0
