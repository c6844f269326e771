"""Phi-3 against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
from support.families import BACKENDS, check_against_transformers, tiny_model

SHAPE = {"head_dim": 16, "hidden_size": 64}
HALF = (("rope_type", "default"), ("rope_theta", 500.0), ("partial_rotary_factor", 0.5))
VARIANTS = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "partial rotation": {"rope_parameters": HALF, "partial_rotary_factor": 0.5},
    "window": {"sliding_window": 6},
    "window that covers all": {"sliding_window": 200},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    check_against_transformers(tiny_model("Phi3", **SHAPE, **VARIANTS[variant]), backend)
