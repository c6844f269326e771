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
from pelton.engine.llm import LLM
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


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_vectors_are_cut_as_the_checkpoint_says(folder, device):
    write(folder / "config_sentence_transformers.json", {"truncate_dim": 5})
    engine = TinyEngine(folder, device=device, runner="auto")
    (prompt,) = prompts_of([9])
    asked = [
        PoolingParams(),
        PoolingParams(dimensions=5),
        PoolingParams(dimensions=7),
        PoolingParams(task="token_embed"),
    ]
    default, five, whole, tokens = engine.pool([prompt] * 4, asked)
    assert (len(default), len(whole), tokens.shape[1]) == (5, 7, 7)
    np.testing.assert_array_equal(default, five)
    np.testing.assert_allclose(default, normalised(whole[:5]), rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"similarity_fn_name": "hamming"}, "similarity_fn_name=.hamming. is not supported"),
        ({"similarity_fn_name": "dot", "truncate_dim": 5}, "truncate_dim=5 with"),
        ({"truncate_dim": 0}, "truncate_dim"),
        ({"default_prompt_name": "query"}, "default_prompt_name"),
    ],
)
def test_options_of_vectors_that_are_refused(folder, keys, text):
    write(folder / "config_sentence_transformers.json", keys)
    with pytest.raises((CheckpointError, UnsupportedError), match=text):
        read_sentence_modules(checkpoint_of(folder))


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(folder, name):
    """As torch computes them of the vectors, and sentence-transformers signs them."""
    write(folder / "config_sentence_transformers.json", {"similarity_fn_name": name})
    modules = json.loads((folder / "modules.json").read_text())
    write(folder / "modules.json", modules[:-1])  # of length 1, dot and cosine are the same
    llm = LLM(str(folder), num_gpu_blocks_override=64)
    first, *others = [{"prompt_token_ids": one} for one in prompts_of([4, 9, 7])]
    outputs = llm.embed([first, *others], use_tqdm=False)
    a, *bs = [torch.tensor(np.array(one.outputs.embedding)) for one in outputs]
    wanted = {
        "cosine": lambda b: torch.cosine_similarity(a, b, dim=0),
        "dot": lambda b: (a * b).sum(),
        "euclidean": lambda b: -torch.dist(a, b, p=2),
        "manhattan": lambda b: -torch.dist(a, b, p=1),
    }[name]
    found = [one.outputs.score for one in llm.score(first, others, use_tqdm=False)]
    assert found == pytest.approx([float(wanted(b)) for b in bs], rel=1e-5)
    llm.close()


def test_a_folder_without_modules_is_no_embedder():
    assert read_sentence_modules(checkpoint_of(tiny_pooled("Qwen3"))) is None
