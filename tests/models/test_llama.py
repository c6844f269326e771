"""Llama's arithmetic against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny import (
    TinyEngine,
    make_config,
    oracle_greedy,
    oracle_logits,
    prompts_of,
    tiny_llama,
)

from pelton.config.params import SamplingParams
from pelton.core.plan import NewRow, SlotRef, StepPlan
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


def engine_logits(engine: TinyEngine, ids: list[int]) -> torch.Tensor:
    """[len(ids), V]: one prefill step, the head applied to every token's hidden state."""
    assembled = engine.worker._assembled
    blocks = np.arange(1, 1 + -(-len(ids) // 4), dtype=np.int32)
    ref = SlotRef(0, 1)
    plan = StepPlan(
        step=0,
        refs=[ref],
        num_scheduled_tokens=np.array([len(ids)], np.int32),
        num_drafts=np.zeros(1, np.int32),
        num_computed_bound=np.zeros(1, np.int32),
        samples=np.ones(1, np.bool_),
        new_rows=[
            NewRow(
                ref=ref,
                request_id="a",
                token_ids=np.array(ids, np.int32),
                prompt_len=len(ids),
                num_computed_tokens=0,
                block_ids=(blocks,),
                params=SamplingParams(temperature=0.0),
                seed=0,
            )
        ],
    )
    with torch.inference_mode():
        in_flight = assembled.runner.start(plan)
        dtype = getattr(torch, engine.config.dtype)
        out = torch.empty(len(ids), engine.config.model.vocab_size, dtype=dtype)
        engine.worker.model.head(in_flight.hidden, out)
        assembled.runner.finish(in_flight).collect()
    return out


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
    assert engine.generate(prompts) == [oracle_greedy(folder, p, 12) for p in prompts]


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
