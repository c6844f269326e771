"""OLMo 2 and OLMoE against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import make_config

from pelton.errors import CheckpointError, UnsupportedError
from pelton.setup.resolve import num_parameters

YARN = (
    ("rope_type", "yarn"),
    ("factor", 4.0),
    ("rope_theta", 10000.0),
    ("original_max_position_embeddings", 64),
)
# transformers' OLMoE takes no other head_dim than hidden_size / num_attention_heads.
MOE = {"hidden_size": 64, "intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
VARIANTS = {
    "olmo2": ("Olmo2", {}),
    "olmo2 heads of its own width": ("Olmo2", {"head_dim": 8, "num_key_value_heads": 4}),
    "olmo2 biases": ("Olmo2", {"attention_bias": True}),
    "olmo2 tied": ("Olmo2", {"tie_word_embeddings": True}),
    "olmo2 epsilon": ("Olmo2", {"rms_norm_eps": 0.3}),
    "olmo2 yarn": ("Olmo2", {"rope_parameters": YARN}),
    "olmoe": ("Olmoe", MOE),
    "olmoe normalised": ("Olmoe", {**MOE, "norm_topk_prob": True}),
    "olmoe biases": ("Olmoe", {**MOE, "attention_bias": True, "num_key_value_heads": 4}),
    "olmoe tied": ("Olmoe", {**MOE, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    family, overrides = VARIANTS[variant]
    check_against_transformers(tiny_model(family, **overrides), backend)


@pytest.mark.parametrize("variant", ["olmo2", "olmo2 biases", "olmoe"])
def test_number_of_parameters_equals_transformers(variant):
    family, overrides = VARIANTS[variant]
    folder = tiny_model(family, **overrides)
    tensors = load_file(folder / "model.safetensors")
    assert num_parameters(make_config(folder).model) == sum(t.numel() for t in tensors.values())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"clip_qkv": 8.0}, UnsupportedError, "clip_qkv=8.0 is not supported"),
        (
            {"num_experts": 0, "num_local_experts": 0},
            CheckpointError,
            "num_experts must be 1 or more",
        ),
    ],
)
def test_what_olmoe_does_not_have(changes, error, message, tmp_path):
    folder = tiny_model("Olmoe", **MOE)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(error, match=message):
        make_config(tmp_path)
