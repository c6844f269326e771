"""Granite, dense and hybrid, against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import BACKENDS, check_against_transformers, tiny_model

FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.13,
    "residual_multiplier": 0.37,
    "logits_scaling": 2.5,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ("linear_attention", "full_attention", "linear_attention"),
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "attention_multiplier": 0.25,
}
ROPE = (("rope_type", "default"), ("rope_theta", 500.0))
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Granite", {}),
    "dense factors": ("Granite", FACTORS),
    "dense biases, tied": (
        "Granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "hybrid": ("GraniteMoeHybrid", HYBRID),
    "hybrid factors": ("GraniteMoeHybrid", {**HYBRID, **FACTORS}),
    "hybrid groups": ("GraniteMoeHybrid", {**HYBRID, "mamba_n_groups": 3, "mamba_d_state": 5}),
    "hybrid no conv bias": ("GraniteMoeHybrid", {**HYBRID, "mamba_conv_bias": False}),
    "hybrid biases": (
        "GraniteMoeHybrid",
        {**HYBRID, "mamba_proj_bias": True, "attention_bias": True},
    ),
    "hybrid wide conv": ("GraniteMoeHybrid", {**HYBRID, "mamba_d_conv": 6}),
    "hybrid rope": (
        "GraniteMoeHybrid",
        {**HYBRID, "position_embedding_type": "rope", "rope_parameters": ROPE},
    ),
    "hybrid steps": ("GraniteMoeHybrid", {**HYBRID, "time_step_limit": (0.7, 1.4)}),
    "hybrid tied": ("GraniteMoeHybrid", {**HYBRID, "tie_word_embeddings": True}),
    "hybrid eps": ("GraniteMoeHybrid", {**HYBRID, "rms_norm_eps": 1e-2}),
    "hybrid auto heads": (
        "GraniteMoeHybrid",
        {**HYBRID, "mamba_d_head": "auto", "mamba_n_heads": 12, "mamba_expand": 3},
    ),
    "all attention": (
        "GraniteMoeHybrid",
        {**HYBRID, "layer_types": ("full_attention",) * 3, "position_embedding_type": "rope"},
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    family, overrides = VARIANTS[variant]
    check_against_transformers(tiny_model(family, **overrides), backend)
