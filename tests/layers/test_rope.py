"""Frequencies and factors of scaled rotations, bit for bit those of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.families import check_against_transformers, tiny_model
from support.tiny import make_config, oracle

from pelton.errors import CheckpointError, UnsupportedError
from pelton.layers.rope import inverse_frequencies, rope_tables

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": tuple(1.0 + i / 4 for i in range(8)),
    "long_factor": tuple(2.0 + i for i in range(8)),
}
PHI = {"head_dim": 16, "hidden_size": 64, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "yarn": ("Qwen3", YARN, {}),
    "yarn untruncated": ("Qwen3", {**YARN, "truncate": False}, {}),
    "yarn betas": ("Llama", {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}, {}),
    "yarn factor": ("Mistral", {**YARN, "attention_factor": 0.7}, {}),
    "yarn mscale": ("Llama", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3}, {}),
    "yarn one mscale": ("Llama", {**YARN, "mscale": 0.707}, {}),
    "yarn shrinks": ("Llama", {**YARN, "factor": 1.0}, {}),
    "yarn long theta": ("Qwen2", {**YARN, "rope_theta": 1e6}, {"hidden_size": 64}),
    "longrope": ("Phi3", LONG, PHI),
    "longrope factor": ("Phi3", {**LONG, "factor": 8.0}, PHI),
    "longrope attention factor": ("Phi3", {**LONG, "attention_factor": 1.3}, PHI),
    "longrope in full": ("Phi3", LONG, {**PHI, "original_max_position_embeddings": 256}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, {}),
    "yarn beside": ("Llama", YARN, {"original_max_position_embeddings": 32}),
}


def folder_of(case: str) -> Any:
    family, rope, changes = CASES[case]
    return tiny_model(family, rope_parameters=tuple(rope.items()), **changes)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_equal_transformers(case):
    folder = folder_of(case)
    rope = make_config(folder).model.rope
    theirs = oracle(folder).model.rotary_emb
    assert torch.equal(inverse_frequencies(rope), theirs.inv_freq)
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling, rel=1e-12)
    cos, sin = rope_tables(rope, 64, torch.float32)
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(64)[None])
    torch.testing.assert_close(cos, their_cos[0], rtol=0, atol=1e-7)
    torch.testing.assert_close(sin, their_sin[0, :, : sin.shape[1]], rtol=0, atol=1e-7)


@pytest.mark.parametrize("case", ["yarn", "yarn mscale", "longrope", "dynamic"])
def test_logits_and_greedy_tokens_equal_transformers(case):
    check_against_transformers(folder_of(case), "torch")


def test_contexts():
    """yarn's files often give the length before it is stretched; longrope ends at it."""
    lengths = {case: make_config(folder_of(case)).model.max_position for case in CASES}
    assert lengths["yarn"] == lengths["dynamic"] == lengths["longrope in full"] == 256
    assert lengths["longrope"] == 128
    longer = tiny_model("Qwen3", rope_parameters=tuple({**YARN, "factor": 8.0}.items()))
    assert make_config(longer).model.max_position == 512


def test_wrong_values_are_refused(tmp_path):
    values = json.loads((folder_of("yarn") / "config.json").read_text())

    def read(**changes: Any) -> None:
        rope = {**values["rope_parameters"], **changes}
        (tmp_path / "config.json").write_text(json.dumps({**values, "rope_parameters": rope}))
        make_config(tmp_path)

    (tmp_path / "model.safetensors").symlink_to(folder_of("yarn") / "model.safetensors")
    with pytest.raises(CheckpointError, match="beta_fast must be at least beta_slow=2, got"):
        read(beta_fast=1.0, beta_slow=2.0)
    with pytest.raises(CheckpointError, match="short_factor must be a list of 8 numbers above 0"):
        read(rope_type="longrope", short_factor=[1.0] * 7)
    with pytest.raises(UnsupportedError, match='rope_type="ntk" is not supported; it must be'):
        read(rope_type="ntk")


def test_yarn_of_phi3_is_refused(tmp_path):
    """transformers reads it as an old name of longrope."""
    folder = folder_of("longrope")
    text = (folder / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"longrope"', '"yarn"'))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r'"yarn" is not supported in Phi-3'):
        make_config(tmp_path)
