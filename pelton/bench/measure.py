"""What all benchmarks share: the sides of a comparison, their prompts, and taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from pelton.config.params import SamplingParams
from pelton.core.plan import Int32Array
from pelton.errors import EngineError

Sample = TypeVar("Sample")
AnySide = TypeVar("AnySide")


class Side(Protocol):
    """Something that continues prompts greedily."""

    def generate(self, prompts: Int32Array, output_len: int) -> Int32Array:
        """[B, T] -> [B, output_len], token ids; end tokens do not end a row."""
        ...


class EngineSide:
    """The engine, through its offline API (`llm` is a pelton.LLM)."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(self, prompts: Int32Array, output_len: int) -> Int32Array:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        rows = [{"prompt_token_ids": row} for row in prompts.tolist()]
        outputs = self._llm.generate(rows, params, use_tqdm=False)
        for output in outputs:
            if output.error:
                raise EngineError(f"A benchmark's request failed: {output.error}")
        return np.asarray([output.outputs[0].token_ids for output in outputs], dtype=np.int32)


def random_prompts(vocab_size: int, batch_size: int, input_len: int, seed: int) -> Int32Array:
    """[batch_size, input_len] random token ids, the same for the same seed."""
    generator = np.random.default_rng(abs(seed))
    return generator.integers(0, vocab_size, (batch_size, input_len), dtype=np.int32)


def timed_generate(side: Side, prompts: Int32Array, output_len: int) -> float:
    """Seconds taken. Raises EngineError if the ids are not [B, output_len]."""
    begin = time.perf_counter()
    ids = side.generate(prompts, output_len)
    seconds = time.perf_counter() - begin
    if ids.shape != (len(prompts), output_len):
        raise EngineError(
            f"Asked for {len(prompts)} x {output_len} tokens, got an array of {ids.shape}."
        )
    return seconds


def alternate(
    sides: Sequence[AnySide], once: Callable[[AnySide], Sample], *, num_warmup: int, num_iters: int
) -> list[list[Sample]]:
    """Runs `once` for each side in turn, num_iters times after num_warmup uncounted ones.

    Returns each side's samples; sample i of one side and of another are a pair, taken side by side.
    The order within a pair is swapped each time, so that a drifting machine favours nobody.
    """
    samples: list[list[Sample]] = [[] for _ in sides]
    for iteration in range(-num_warmup, num_iters):
        order = range(len(sides)) if iteration % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            sample = once(sides[index])
            if iteration >= 0:
                samples[index].append(sample)
    return samples
