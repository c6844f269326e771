"""The plain engine, and what every other way of running a request is compared with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny import TinyEngine, tiny_llama

from pelton.config.params import SamplingParams


def greedy(num_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **changes)


def seeded(num_tokens: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.9, top_k=60, max_tokens=num_tokens, ignore_eos=True, **changes
    )


KINDS: dict[str, Callable[..., SamplingParams]] = {"greedy": greedy, "seeded": seeded}


@functools.cache
def plain_engine(folder: Path, kv_dtype: str = "float32") -> TinyEngine:
    """Each request alone, reference attention, one step at a time, no prefix cache."""
    return TinyEngine(
        folder,
        kv_dtype=kv_dtype,
        attention_backend="reference",
        max_steps_in_flight=1,
        enable_prefix_caching=False,
        max_num_batched_tokens=128,
    )


_known: dict[Any, list[int]] = {}


def plain_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 7,
    folder: Path | None = None,
    kv_dtype: str = "float32",
) -> list[int]:
    """The plain engine's tokens of one request."""
    folder = folder or tiny_llama()
    key = folder, tuple(prompt), repr(params), seed, kv_dtype
    if key not in _known:
        engine = plain_engine(folder, kv_dtype)
        name = engine.add(prompt, params, seed=seed)
        outcome = engine.run()[name]
        assert outcome.finish_reason in ("length", "stop"), outcome.error
        _known[key] = outcome.token_ids
    return _known[key]


def logprobs_of(engine: TinyEngine, name: str, num_top: int = 3) -> list[tuple[Any, ...]]:
    """Per output token: its log-probability and rank, and the top ones, as exact floats."""
    found = []
    for rows, first, last in engine.outcomes[name].logprobs:
        for row in range(first, last):
            found.append(
                (
                    float(rows.token_logprobs[row]),
                    int(rows.ranks[row]),
                    tuple(rows.top_ids[row, :num_top].tolist()),
                    tuple(rows.top_logprobs[row, :num_top].astype(np.float64).tolist()),
                )
            )
    return found


def check_plain(engine: TinyEngine, prompts: Sequence[Sequence[int]]) -> None:
    """All prompts, greedy and seeded, together in `engine`, give the plain engine's tokens."""
    expected = {}
    for index, prompt in enumerate(prompts):
        for make in KINDS.values():
            name = engine.add(prompt, make(), seed=index)
            expected[name] = plain_tokens(prompt, make(), seed=index)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == tokens, name
        assert outcomes[name].finish_reason == "length"
