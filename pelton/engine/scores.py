"""How well two texts go together: the similarity of their vectors, or a classifier's word on the
pair. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pelton.config.pooling import PoolingConfig, Similarity
from pelton.engine.outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pelton.engine.prompts import Prompt
from pelton.errors import RequestError


def pair_up(
    data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt]
) -> list[tuple[Prompt, Prompt]]:
    """One of data_1 with each of data_2, or each with its own.

    Raises RequestError for other numbers, and for none.
    """
    first, second = _as_list(data_1), _as_list(data_2)
    for name, given in (("data_1", first), ("data_2", second)):
        if not given:
            raise RequestError(f"{name} must have at least 1 prompt, got none.", field=name)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise RequestError(
            f"data_1 must have one prompt, or as many as data_2, which has {len(second)}; it has "
            f"{len(first)}.",
            field="data_1",
        )
    return list(zip(first, second, strict=True))


def scores_pairs(config: PoolingConfig) -> bool:
    """Whether a pair goes through the model as one prompt: a classifier (cross-encoder) judges it.
    Else each text does, and their vectors are compared.

    Raises RequestError for a classifier of several classes, which says no score.
    """
    if "classify" not in config.tasks:
        return False
    if config.num_labels != 1:
        raise RequestError(
            f"a score is that of one class, and this model has {config.num_labels}; ask for "
            "classes.",
            field="task",
        )
    return True


def as_pair_prompt(first: Prompt, second: Prompt) -> Prompt:
    """Raises RequestError for what is no text."""
    texts = [one if isinstance(one, str) else one.get("prompt") for one in (first, second)]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError("a pair to be scored must be two texts.", field="prompt")
    return {"prompt": texts[0], "prompt_pair": texts[1]}


def score_of(
    first: PoolingRequestOutput[PoolingOutput],
    second: PoolingRequestOutput[PoolingOutput],
    kind: Similarity,
) -> ScoringRequestOutput:
    """Of two vectors; their request ids and prompts are joined."""
    output: ScoringRequestOutput = PoolingRequestOutput(
        request_id=f"{first.request_id}_{second.request_id}",
        prompt=None,
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
        finished=True,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        error=first.error or second.error,
    )
    if first.outputs is not None and second.outputs is not None:
        output.outputs = ScoringOutput(similarity(kind, first.outputs.data, second.outputs.data))
    return output


def similarity(kind: Similarity, first: np.ndarray, second: np.ndarray) -> float:
    """Of two vectors [D] of any length; the higher, the more alike. Source: sentence-transformers,
    whose distances are negative, too."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    if kind == "dot":
        return float(a @ b)
    if kind == "euclidean":
        return -float(np.linalg.norm(a - b))
    if kind == "manhattan":
        return -float(np.abs(a - b).sum())
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths else 0.0


def _as_list(data: Prompt | Sequence[Prompt]) -> list[Prompt]:
    return [data] if isinstance(data, (str, Mapping)) else list(data)
