"""Tiny random checkpoints that are pooled, and transformers' results of them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.families import tiny_model
from support.folders import new_folder
from support.texts import byte_backend

# transformers' class, by what the checkpoint ends in.
ENDINGS = {
    "embed": "AutoModel",
    "classify": "AutoModelForSequenceClassification",
    "token_classify": "AutoModelForTokenClassification",
}


@functools.cache
def tiny_pooled(
    family: str, ending: str = "embed", base_values: tuple[Any, ...] = (), **overrides: Any
) -> Path:
    """A folder with `family`'s tiny random model that ends in hidden states or a classifier.
    base_values: pairs, what tiny_model is to be told."""
    import transformers

    base = tiny_model(family, **dict(base_values))
    torch.manual_seed(1)
    config = transformers.AutoConfig.from_pretrained(base, **overrides)
    model = getattr(transformers, ENDINGS[ending]).from_pretrained(
        base, config=config, dtype=torch.float32
    )
    folder = new_folder("pooled")
    model.save_pretrained(folder)
    return folder


@functools.cache
def with_byte_tokens(folder: Path) -> Path:
    """A copy of a model that has a tokenizer, whose tokens are bytes."""
    copy = new_folder("pooled") / "tiny-pooled"
    shutil.copytree(folder, copy)
    byte_backend().save(str(copy / "tokenizer.json"))
    return copy


@functools.cache
def _oracle(folder: Path, ending: str) -> Any:
    import transformers

    kind = getattr(transformers, ENDINGS[ending])
    return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def hidden_states(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """[len(ids), H], behind the last norm."""
    states = _oracle(folder, "embed")(torch.tensor([list(ids)])).last_hidden_state[0]
    return np.asarray(states)


@torch.no_grad()
def scores(folder: Path, ids: Sequence[int], ending: str) -> np.ndarray:
    """[num_labels], or [len(ids), num_labels] of a classifier of tokens."""
    return np.asarray(_oracle(folder, ending)(torch.tensor([list(ids)])).logits[0])


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The least one of all rows."""
    assert a.shape == b.shape
    a, b = normalised(a.astype(np.float64)), normalised(b.astype(np.float64))
    return float((a * b).sum(axis=-1).min())


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def classifier_of(folder: Path, ending: str = "classify") -> np.ndarray:
    """[num_labels, H]"""
    return np.asarray(_oracle(folder, ending).score.weight.detach())


@torch.no_grad()
def embeddings_of(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """[len(ids), H] float32, as the model is given them."""
    table = _oracle(folder, "embed").get_input_embeddings()
    return np.asarray(table(torch.tensor([int(token) for token in ids])))
