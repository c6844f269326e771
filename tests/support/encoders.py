"""Tiny random encoders, and transformers' word on them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.folders import new_folder

VOCAB = 120


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
def oracle(folder: Path, ending: str = "Model") -> Any:
    """transformers' model of the folder, float32."""
    import transformers

    kind = {"Model": "AutoModel"}.get(ending, f"AutoModel{ending}")
    return (
        getattr(transformers, kind)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )


def oracle_states(
    folder: Path, ids: Sequence[int], types: Sequence[int] | None = None
) -> torch.Tensor:
    """[T, H]: the last hidden states of one text."""
    more = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.no_grad():
        return oracle(folder)(torch.tensor([ids]), **more).last_hidden_state[0]
