"""Tiny random encoders, and transformers' word on them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.folders import new_folder
from support.pooled import tiny_pooled
from support.tiny import TinyEngine

from pelton.config.pooling import PoolingParams

VOCAB = 120
ARCHITECTURES = {
    "BertModel": ("Bert", {}),
    "ModernBertModel": ("ModernBert", {"local_attention": 12}),
    "RobertaModel": ("Roberta", {"type_vocab_size": 1}),
    "XLMRobertaModel": ("XLMRoberta", {"type_vocab_size": 1}),
}
"""Of models that take no part in what is tested of all that generate."""


@functools.cache
def tiny_encoder(family: str, ending: str = "Model", **overrides: Any) -> Path:
    """A folder with a random model of transformers' `family` ("Bert") in float32, with biases and
    norms that are not what they start as."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 130,
        "initializer_range": 0.2,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "cls_token_id": 0,
        "sep_token_id": 2,
    }
    values.update(overrides)
    torch.manual_seed(0)
    folder = new_folder("encoder")
    model = getattr(transformers, f"{family}{ending}")(
        getattr(transformers, f"{family}Config")(**values)
    ).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.1)
            if "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@functools.cache
def both_ways(family: str) -> Path:
    """A decoder that is pooled, whose tokens see those behind them."""
    folder = new_folder("both_ways")
    shutil.copytree(tiny_pooled(family), folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    return folder


@functools.cache
def transformers_model(folder: Path, ending: str = "Model") -> Any:
    import transformers

    kind = "AutoModel" if ending == "Model" else f"AutoModel{ending}"
    found = getattr(transformers, kind)
    return found.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def oracle(
    folder: Path, ids: Sequence[int], second: int | None = None, ending: str = "Model"
) -> np.ndarray:
    """transformers' last hidden states [T, H] of one text, or logits of a classifier: [labels], or
    [T, labels]. second: where the second text begins."""
    more = {}
    if second is not None:
        types = [int(at >= second) for at in range(len(ids))]
        more["token_type_ids"] = torch.tensor([types])
    output = transformers_model(folder, ending)(torch.tensor([list(ids)]), **more)
    return np.asarray((output.last_hidden_state if ending == "Model" else output.logits)[0])


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Token ids of texts, special tokens and padding left out."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


def pooled(
    engine: TinyEngine,
    texts: Sequence[Sequence[int]],
    params: PoolingParams,
    seconds: Sequence[int | None] | None = None,
) -> list[np.ndarray]:
    """All in one go."""
    names = [
        engine.add(text, params, second_segment=second)
        for text, second in zip(texts, seconds or [None] * len(texts), strict=True)
    ]
    outcomes = engine.run()
    assert all(outcomes[name].error is None for name in names)
    return [outcomes[name].pooled for name in names]
