"""Models whose weights stay in quantised blocks: as if they were dequantised, up to what the
integers of x cost, and the invariance list, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_models import as_gguf
from support.plain import KINDS, logprobs_of
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.config.quant import QuantConfig
from pelton.device.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")

GGUF = QuantConfig(scheme="gguf")
PROMPTS = prompts_of([1, 8, 21, 37], seed=9)
# As llama.cpp's Q4_K_M has it: several types in one product; and a type that is dequantised.
MIXES = {
    "Q8_0": (("", "Q8_0"),),
    "Q4_1": (("token_embd", "Q8_0"), ("", "Q4_1")),
    "Q5": (("attn_v", "F16"), ("ffn", "Q5_1"), ("", "Q5_0")),
    "Q4_K_M": (
        ("attn_v", "Q6_K"),
        ("ffn_down", "Q6_K"),
        ("ffn_up", "Q5_K"),
        ("token_embd", "Q6_K"),
        ("", "Q4_K"),
    ),
}
with_each_mix = pytest.mark.parametrize("mix", MIXES)


@functools.cache
def folder_of(mix: str) -> Path:
    tied = mix == "Q4_1"
    folder = tiny_llama(
        hidden_size=256,
        intermediate_size=256,
        head_dim=64,
        vocab_size=1000,
        initializer_range=0.12,
        tie_word_embeddings=tied,
    )
    return as_gguf(folder, forms=MIXES[mix])


def engine_of(mix: str, **changes: Any) -> TinyEngine:
    return TinyEngine(
        folder_of(mix), **{"quantization": GGUF, "max_num_seqs": 8, "num_blocks": 200, **changes}
    )


def invariant(mix: str, **changes: Any) -> TinyEngine:
    chosen = {"attention_backend": "invariant", "batch_invariant": True, "dtype": "bfloat16"}
    return engine_of(mix, **{**chosen, **changes})


Bits = list[list[tuple[Any, ...]]]


def bits(engine: TinyEngine, prompts: Sequence[Sequence[int]] = PROMPTS) -> Bits:
    """All prompts together, greedy and seeded: tokens and log-probabilities as they are."""
    names = [
        engine.add(prompt, make(5, logprobs=3), seed=index)
        for index, prompt in enumerate(prompts)
        for make in KINDS.values()
    ]
    outcomes = engine.run()
    assert all(outcomes[name].error is None for name in names)
    return [[outcomes[name].token_ids, *logprobs_of(engine, name)] for name in names]


@functools.cache
def alone(mix: str) -> Bits:
    """Each request by itself, a step at a time, without a prefix cache."""
    engine = invariant(mix, max_steps_in_flight=1, enable_prefix_caching=False)
    found: Bits = []
    for index, prompt in enumerate(PROMPTS):
        for make in KINDS.values():
            name = engine.add(prompt, make(5, logprobs=3), seed=index)
            engine.run()
            found.append([engine.outcomes[name].token_ids, *logprobs_of(engine, name)])
    return found


@with_each_mix
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_if_dequantised(mix, dtype):
    """The same weights: logits differ by what the codes of x leave out."""
    found = []
    for quantization in (GGUF, QuantConfig()):
        engine = engine_of(mix, quantization=quantization, dtype=dtype)
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        names = [engine.add(prompt, params) for prompt in PROMPTS]
        engine.run()
        found.append([logprobs_of(engine, name, 20)[0] for name in names])
    for ours, plain in zip(*found, strict=True):
        shared = set(ours[2]) & set(plain[2])
        assert len(shared) >= 14, "mostly the same candidates"
        values = [dict(zip(row[2], row[3], strict=True)) for row in (ours, plain)]
        errors = torch.tensor([values[0][token] - values[1][token] for token in shared]).abs()
        assert 1e-6 < errors.max() < 0.5
        assert errors.mean() < 0.15


@with_each_mix
def test_company_and_chunks(mix):
    for changes in ({}, {"long_prefill_token_threshold": 3}, {"max_num_batched_tokens": 17}):
        assert bits(invariant(mix, **changes)) == alone(mix)


@with_each_mix
def test_depth_hits_and_preemption(mix):
    engine = invariant(mix, device="queued", max_steps_in_flight=3)
    assert bits(engine) == alone(mix)
    assert bits(engine) == alone(mix)  # hits what the first round left
    tight = invariant(mix, device="fake", num_blocks=40, long_prefill_token_threshold=5)
    assert bits(tight) == alone(mix)
    assert tight.loop.scheduler.stats.num_preemptions > 0


def test_weights_are_in_blocks_and_the_tied_one_once():
    model = engine_of("Q4_1").worker.model
    parameters = model.parameters()
    kept = {name for name, parameter in parameters.items() if parameter.blocks is not None}
    assert kept == {name for name, p in parameters.items() if not name.endswith("norm.weight")}
    assert all(parameters[name].tensor.numel() == 0 for name in kept)
    assert model.output.weight.blocks is model.embedding.weight.blocks


def test_a_part_of_another_type_makes_numbers_of_its_weight_alone():
    parameters = engine_of("Q5").worker.model.parameters()
    plain = {name for name, p in parameters.items() if p.blocks is None and "norm" not in name}
    assert plain == {"layers.0.qkv.weight", "layers.1.qkv.weight"}
