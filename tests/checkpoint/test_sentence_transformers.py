"""What sentence-transformers' files say of pooling, and what of it is refused."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.pooled import hidden_states, normalised, tiny_pooled
from support.tiny import TinyEngine, checkpoint_of, prompts_of

from pelton.checkpoint.sentence_transformers import read_sentence_modules
from pelton.config.pooling import PoolingParams
from pelton.errors import CheckpointError, UnsupportedError

SIZES = (48, 20, 7)


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def module(index: int, kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}


@pytest.fixture
def folder(tmp_path):
    """A decoder with mean pooling, two products and a length of 1."""
    target = tmp_path / "model"
    shutil.copytree(tiny_pooled("Qwen3"), target)
    write(target / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    paths = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"]
    write(target / "modules.json", [module(i, k, p) for i, (k, p) in enumerate(zip(kinds, paths))])
    generator = torch.Generator().manual_seed(3)
    for index, (ins, outs) in enumerate(pairwise(SIZES)):
        place = target / f"{2 + index}_Dense"
        name = ("activation.Tanh", "linear.Identity")[index]
        config = {"in_features": ins, "out_features": outs, "bias": index == 0}
        write(
            place / "config.json",
            {**config, "activation_function": f"torch.nn.modules.{name}"},
        )
        tensors = {"linear.weight": torch.randn(outs, ins, generator=generator)}
        if index == 0:
            tensors["linear.bias"] = torch.randn(outs, generator=generator)
        save_file(tensors, place / "model.safetensors")
    return target


def products_of(folder: Path) -> list[dict[str, np.ndarray]]:
    from safetensors.numpy import load_file

    return [load_file(folder / f"{i}_Dense" / "model.safetensors") for i in (2, 3)]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_vectors_go_through_the_products(folder, device):
    engine = TinyEngine(folder, device=device, runner="auto", long_prefill_token_threshold=3)
    assert engine.config.pooling.method == "mean"
    assert engine.config.pooling.embedding_size == 7
    first, second = products_of(folder)
    prompts = prompts_of([1, 9, 20])
    asked = [PoolingParams(), PoolingParams(dimensions=3), PoolingParams(use_activation=False)]
    results = iter(engine.pool(prompts * 3, [one for one in asked for _ in prompts]))
    for params in asked:
        for prompt in prompts:
            mean = hidden_states(folder, prompt).mean(axis=0)
            inner = np.tanh(first["linear.weight"] @ mean + first["linear.bias"])
            wanted = (second["linear.weight"] @ inner)[: params.dimensions]
            if params.use_activation is None:
                wanted = normalised(wanted)
            np.testing.assert_allclose(next(results), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "method"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode_max_tokens": True}, UnsupportedError),
        ({"pooling_mode": "max"}, UnsupportedError),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, UnsupportedError),
        ({}, UnsupportedError),
    ],
)
def test_methods(folder, keys, method):
    write(folder / "1_Pooling" / "config.json", keys)
    if isinstance(method, str):
        modules = read_sentence_modules(checkpoint_of(folder))
        assert modules is not None
        assert modules.method == method
        assert modules.normalises
    else:
        with pytest.raises(method):
            read_sentence_modules(checkpoint_of(folder))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: write(f / "modules.json", {}), "must hold a JSON list"),
        (lambda f: write(f / "modules.json", [module(0, "Pooling", "no")]), "cannot be read"),
        (lambda f: write(f / "modules.json", [module(0, "WordWeights")]), "WordWeights"),
        (lambda f: write(f / "modules.json", [module(0, "Dense", "2_Dense")]), "at its place"),
        (lambda f: (f / "2_Dense" / "model.safetensors").unlink(), "there is no such file"),
        (
            lambda f: shutil.copy(
                f / "3_Dense" / "model.safetensors", f / "2_Dense" / "model.safetensors"
            ),
            "must hold",
        ),
        (
            lambda f: write(f / "2_Dense" / "config.json", {"activation_function": "a.ReLU"}),
            "Tanh and Identity are",
        ),
        (lambda f: shutil.copytree(f / "2_Dense", f / "3_Dense", dirs_exist_ok=True), "must be 20"),
    ],
)
def test_refusals(folder, change, text):
    change(folder)
    with pytest.raises((CheckpointError, UnsupportedError), match=text):
        TinyEngine(folder, runner="auto")


def test_a_folder_without_modules_is_no_embedder():
    assert read_sentence_modules(checkpoint_of(tiny_pooled("Qwen3"))) is None
