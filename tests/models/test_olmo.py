"""OLMo 2 against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import make_config

from pelton.setup.resolve import num_parameters

YARN = (
    ("rope_type", "yarn"),
    ("factor", 4.0),
    ("rope_theta", 10000.0),
    ("original_max_position_embeddings", 64),
)
VARIANTS = {
    "olmo2": ("Olmo2", {}),
    "olmo2 heads of its own width": ("Olmo2", {"head_dim": 8, "num_key_value_heads": 4}),
    "olmo2 biases": ("Olmo2", {"attention_bias": True}),
    "olmo2 tied": ("Olmo2", {"tie_word_embeddings": True}),
    "olmo2 epsilon": ("Olmo2", {"rms_norm_eps": 0.3}),
    "olmo2 yarn": ("Olmo2", {"rope_parameters": YARN}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    family, overrides = VARIANTS[variant]
    check_against_transformers(tiny_model(family, **overrides), backend)


@pytest.mark.parametrize("variant", ["olmo2", "olmo2 biases"])
def test_number_of_parameters_equals_transformers(variant):
    family, overrides = VARIANTS[variant]
    folder = tiny_model(family, **overrides)
    tensors = load_file(folder / "model.safetensors")
    assert num_parameters(make_config(folder).model) == sum(t.numel() for t in tensors.values())
