"""Prompts whose places are embeddings, out of a model's own table unless a test says otherwise."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from support.plain import plain_tokens
from support.tiny import TinyEngine, oracle

from pelton.config.params import SamplingParams
from pelton.core.prompt_embeds import PromptEmbeds, placeholders
from pelton.sampling.processors import ProcessedRow

FORMS = ("text", "embeds", "mix")
NOTED: list[list[int]] = []
"""What `note_tokens` has seen."""


def own_rows(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """[len(ids), H] float32, as transformers' model of the folder takes `inputs_embeds`."""
    with torch.no_grad():
        return oracle(folder).get_input_embeddings()(torch.tensor(list(ids))).numpy()


def in_base64(rows: torch.Tensor) -> str:
    """As requests over HTTP have them."""
    return base64.b64encode(save({"a": rows})).decode()


def places_of(form: str, length: int) -> np.ndarray:
    """[length] bool, which places are embeddings: none, all, or runs of one to three."""
    if form == "mix":
        return np.arange(length) * 5 % 7 < 4
    return np.full(length, form == "embeds")


def as_form(folder: Path, ids: Sequence[int], is_row: np.ndarray) -> dict[str, Any]:
    """`prompt`, and perhaps `prompt_embeds`, for TinyEngine.add: what the text says, otherwise."""
    if not is_row.any():
        return {"prompt": ids}
    rows = own_rows(folder, np.array(ids)[is_row])
    return {
        "prompt": np.where(is_row, placeholders(is_row), ids),
        "prompt_embeds": PromptEmbeds(rows, "float32"),
    }


def add_form(
    engine: TinyEngine,
    folder: Path,
    ids: Sequence[int],
    params: SamplingParams,
    form: str,
    seed: int = 7,
) -> str:
    given = as_form(folder, ids, places_of(form, len(ids)))
    return engine.add(params=params, seed=seed, **given)


def note_tokens(scores: torch.Tensor, row: ProcessedRow) -> None:
    """A logits processor that does nothing but look."""
    NOTED.append(row.token_ids[: int(row.num_tokens)].tolist())


def check_forms(
    engine: TinyEngine, folder: Path, prompts: Sequence[Sequence[int]], kinds: dict[str, Any]
) -> None:
    """All prompts, in all forms and kinds, together in `engine`, give the plain engine's tokens of
    the text."""
    expected = {}
    for index, prompt in enumerate(prompts):
        for form in FORMS:
            for make in kinds.values():
                name = add_form(engine, folder, prompt, make(), form, index)
                expected[name] = plain_tokens(prompt, make(), seed=index, folder=folder)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == tokens, name
