"""Qwen 2 and 3 against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
from support.families import BACKENDS, check_against_transformers, tiny_model

VARIANTS = {
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 idle window": ("Qwen2", {"sliding_window": 8}),
    "qwen2 window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "qwen3 window": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ("sliding_attention", "full_attention"),
        },
    ),
    "qwen3 biases": ("Qwen3", {"attention_bias": True}),
    "qwen3 odd head": ("Qwen3", {"head_dim": 24, "hidden_size": 40}),
    "qwen3 eps": ("Qwen3", {"rms_norm_eps": 1e-2}),
    "qwen3 linear rope": (
        "Qwen3",
        {
            "rope_parameters": (
                ("rope_type", "linear"),
                ("factor", 4.0),
                ("rope_theta", 10000.0),
            )
        },
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    family, overrides = VARIANTS[variant]
    if family == "Qwen2":
        overrides = {**overrides, "hidden_size": 64, "head_dim": 16}
    check_against_transformers(tiny_model(family, **overrides), backend)
