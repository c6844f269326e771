"""Granite, dense and hybrid, against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import TinyEngine, checkpoint_of, make_config, make_device, prompts_of

from pelton.errors import CheckpointError, UnsupportedError
from pelton.setup.resolve import num_parameters
from pelton.worker.worker import Worker

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
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}
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
    "hybrid experts": ("GraniteMoeHybrid", {**HYBRID, **EXPERTS}),
    "hybrid experts factors": ("GraniteMoeHybrid", {**HYBRID, **EXPERTS, **FACTORS}),
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


@pytest.mark.parametrize(
    "variant", ["hybrid", "hybrid experts", "hybrid biases", "hybrid no conv bias", "dense"]
)
def test_number_of_parameters_equals_transformers(variant):
    family, overrides = VARIANTS[variant]
    folder = tiny_model(family, **overrides)
    tensors = load_file(folder / "model.safetensors")
    assert num_parameters(make_config(folder).model) == sum(t.numel() for t in tensors.values())


def changed(tmp_path: Path, **changes: Any) -> Path:
    """The hybrid's config.json with other values; None leaves a key out."""
    values = json.loads((tiny_model("GraniteMoeHybrid", **HYBRID) / "config.json").read_text())
    values = {k: v for k, v in {**values, **changes}.items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes(
        (tiny_model("GraniteMoeHybrid", **HYBRID) / "model.safetensors").read_bytes()
    )
    return tmp_path


def test_names_of_published_files_mean_the_same(tmp_path):
    """Before transformers 5: other names of layer kinds, "nope", plain Infinity."""
    expected = make_config(tiny_model("GraniteMoeHybrid", **HYBRID)).model
    folder = changed(
        tmp_path,
        layer_types=["mamba", "attention", "mamba"],
        position_embedding_type="nope",
        time_step_limit=[0.0, math.inf],
    )
    assert make_config(folder).model == expected
    folder = changed(tmp_path, layer_types=None, layers_block_type=["mamba", "attention", "mamba"])
    assert make_config(folder).model == expected
    assert expected.layer_kinds == ("recurrent", "full", "recurrent")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"layer_types": ["mamba"] * 3}, UnsupportedError, "recurrent layers alone"),
        ({"layer_types": None}, CheckpointError, "a list of num_hidden_layers=3 names"),
        ({"layer_types": ["mamba", "gru", "mamba"]}, UnsupportedError, "'gru'"),
        ({"position_embedding_type": "alibi"}, UnsupportedError, "position_embedding_type"),
        ({"mamba_n_heads": 7}, CheckpointError, "mamba_n_heads must be"),
        ({"mamba_n_groups": 4}, CheckpointError, "a divisor of mamba_n_heads=6"),
        ({"time_step_limit": [1.0]}, CheckpointError, "two numbers"),
        ({"time_step_limit": [2.0, 1.0]}, CheckpointError, "two numbers"),
        ({"normalization_function": "layernorm"}, UnsupportedError, "normalization_function"),
        ({"hidden_act": "gelu"}, UnsupportedError, "hidden_act"),
        ({"num_local_experts": 1}, CheckpointError, "at most num_local_experts=1"),
    ],
)
def test_what_is_refused(changes, error, text, tmp_path):
    with pytest.raises(error, match=text):
        make_config(changed(tmp_path, **changes))


def test_experts_in_stacks_are_the_same(tmp_path):
    """As transformers 5 has them in memory."""
    folder = tiny_model("GraniteMoeHybrid", **{**HYBRID, **EXPERTS})
    tensors = load_file(folder / "model.safetensors")
    names = {
        "input_linear.weight": "experts.gate_up_proj",
        "output_linear.weight": "experts.down_proj",
        "router.layer.weight": "router.weight",
    }
    for layer in range(3):
        for old, new in names.items():
            at = f"model.layers.{layer}.block_sparse_moe"
            tensors[f"{at}.{new}"] = tensors.pop(f"{at}.{old}")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    prompts = prompts_of([1, 9])
    assert TinyEngine(tmp_path).generate(prompts) == TinyEngine(folder).generate(prompts)


def test_without_weights():
    """Random ones of the right shapes, for every kind of layer."""
    folder = tiny_model("GraniteMoeHybrid", **{**HYBRID, **EXPERTS})
    checkpoint = replace(checkpoint_of(folder), load_format="dummy")
    worker = Worker(make_config(folder), checkpoint, device=make_device("cpu"))
    for name, parameter in worker.model.parameters().items():
        assert set(parameter.filled.values()) == {"loaded"}, name
