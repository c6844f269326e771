"""Qwen 3 MoE against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import TinyEngine, checkpoint_of, make_config, make_device

from pelton.errors import CheckpointError
from pelton.setup.resolve import num_parameters
from pelton.worker.worker import Worker

BASE = {"moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2}
VARIANTS = {
    "plain": {},
    "normalised": {"norm_topk_prob": True},
    "dense below": {"mlp_only_layers": (0,), "norm_topk_prob": True},
    "every second layer": {"decoder_sparse_step": 2},
    "all dense": {"mlp_only_layers": (0, 1)},
    "one of many": {"num_experts": 33, "num_experts_per_tok": 1},
    "all of them": {"num_experts_per_tok": 6},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "window": {"use_sliding_window": True, "sliding_window": 9},
    "idle window": {"sliding_window": 9},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    check_against_transformers(tiny_model("Qwen3Moe", **{**BASE, **VARIANTS[variant]}), backend)


@pytest.mark.parametrize("variant", ["plain", "every second layer", "biases"])
def test_number_of_parameters_equals_transformers(variant):
    folder = tiny_model("Qwen3Moe", **{**BASE, **VARIANTS[variant]})
    tensors = load_file(folder / "model.safetensors")
    assert num_parameters(make_config(folder).model) == sum(t.numel() for t in tensors.values())


def test_stacked_experts_are_the_same(tmp_path):
    """As transformers 5 has them in memory."""
    folder = tiny_model("Qwen3Moe", **BASE)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        each = [
            [tensors.pop(f"{at}.{e}.{name}_proj.weight") for name in ("gate", "up", "down")]
            for e in range(6)
        ]
        tensors[f"{at}.gate_up_proj"] = torch.stack([torch.cat(one[:2]) for one in each])
        tensors[f"{at}.down_proj"] = torch.stack([one[2] for one in each])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    expected = {n: p.tensor for n, p in TinyEngine(folder).worker.model.parameters().items()}
    for name, parameter in TinyEngine(tmp_path).worker.model.parameters().items():
        assert torch.equal(parameter.tensor, expected[name]), name


def test_a_lost_expert_is_missed(tmp_path):
    folder = tiny_model("Qwen3Moe", **BASE)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    tensors[name.replace(".4.", ".6.")] = tensors.pop(name)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    message = r"1 unexpected: .*experts\.6\.up_proj.*1 missing: layers\.1\.experts.*\(up\.4\)"
    with pytest.raises(CheckpointError, match=message):
        TinyEngine(tmp_path)


def test_names_of_the_published_files(tmp_path):
    """The hub's files say num_experts, transformers 5 num_local_experts."""
    folder = tiny_model("Qwen3Moe", **BASE)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")

    def read():
        (tmp_path / "config.json").write_text(json.dumps(config))
        return make_config(tmp_path).model

    config["num_experts"] = config.pop("num_local_experts")
    assert read() == make_config(folder).model
    config["num_local_experts"] = 5
    with pytest.raises(CheckpointError, match="num_experts must be num_local_experts=5, got 6"):
        read()
    config.update(num_local_experts=6, num_experts_per_tok=7)
    with pytest.raises(CheckpointError, match="num_experts_per_tok must be at most num_experts=6"):
        read()


def test_the_dummy_format_fills_every_expert():
    folder = tiny_model("Qwen3Moe", **{**BASE, **VARIANTS["every second layer"]})
    checkpoint = replace(checkpoint_of(folder), load_format="dummy")
    worker = Worker(make_config(folder), checkpoint, device=make_device("cpu"))
    for name, parameter in worker.model.parameters().items():
        assert set(parameter.filled) == set(parameter.parts), name
    assert worker.model.layers[1].mlp.experts.gate_up.tensor.std() > 0.01


def test_the_ladder_shows_what_runs():
    folder = tiny_model("Qwen3Moe", **BASE)
    for backend, changes in BACKENDS.items():
        kernel = TinyEngine(folder, **changes).worker.model.layers[0].mlp.experts.kernel
        assert kernel.names == (("tiled",) if backend == "invariant" else ("sorted",))
