"""The invariance list for pooled requests: a result does not depend on how the engine runs it, nor
on the tasks and methods beside it. With batch_invariant=True, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compose.test_families import FAMILIES, folder_of
from support.batch import padded
from support.pooled import (
    classifier_of,
    cosine,
    hidden_states,
    normalised,
    scores,
    softmax,
    tiny_pooled,
)
from support.tiny import TinyEngine, prompts_of

from pelton.config.pooling import PoolingParams
from pelton.core.descriptor import Descriptor

FOLDER = functools.partial(tiny_pooled, "Qwen3", "classify", num_labels=3)
PROMPTS = prompts_of([1, 3, 8, 12, 21, 37, 50], seed=11)
TAG = 5
for at, ids in enumerate(PROMPTS):
    ids[at % 3 :: 4] = [TAG] * len(ids[at % 3 :: 4])
STEP = PoolingParams(task="token_classify", method="step", step_tag_id=TAG)
KINDS = {
    "classify": PoolingParams(),
    "last": PoolingParams(task="embed"),
    "cls": PoolingParams(task="embed", method="cls"),
    "mean": PoolingParams(task="embed", method="mean"),
    "cut": PoolingParams(task="embed", method="mean", dimensions=7),
    "raw": PoolingParams(task="embed", dimensions=9, use_activation=False),
    "mean class": PoolingParams(task="classify", method="mean", use_activation=False),
    "tokens": PoolingParams(task="token_embed"),
    "token classes": PoolingParams(task="token_classify"),
    "step": STEP,
    "step columns": replace(STEP, returned_token_ids=(2, 0)),
    "step vectors": PoolingParams(
        task="token_embed", method="step", step_tag_id=TAG, dimensions=6, returned_token_ids=(5, 1)
    ),
}
INVARIANT = {"attention_backend": "invariant", "batch_invariant": True}


@functools.cache
def expected(kind: str, index: int) -> np.ndarray:
    """transformers' hidden states, and plain arithmetic."""
    params, ids = KINDS[kind], np.array(PROMPTS[index])
    hidden = hidden_states(FOLDER(), PROMPTS[index]).astype(np.float64)
    method = params.method or ("all" if params.is_per_token else "last")
    features = {
        "last": lambda: hidden[-1:],
        "cls": lambda: hidden[:1],
        "mean": lambda: hidden.mean(axis=0, keepdims=True),
        "all": lambda: hidden,
        "step": lambda: hidden[ids == TAG],
    }[method]()
    if params.task in (None, "classify", "token_classify"):
        values = features @ classifier_of(FOLDER()).T
        values = values if params.use_activation is False else softmax(values)
    else:
        values = features[:, : params.dimensions]
        values = values if params.use_activation is False else normalised(values)
    if params.returned_token_ids is not None:
        values = values[:, list(params.returned_token_ids)]
    return values if params.is_per_token else values[0]


def run(
    engine: TinyEngine, *, preempt_every: int = 0, indices: Sequence[int] = range(len(PROMPTS))
) -> dict[tuple[str, int], np.ndarray]:
    """Prompts pooled in every way, all at once. preempt_every: so many of the first 40 steps."""
    names = {
        (kind, index): engine.add(PROMPTS[index], params)
        for index in indices
        for kind, params in KINDS.items()
    }
    for count in range(40 if preempt_every else 0):
        if not engine.loop.has_work():
            break
        engine.step()
        running = engine.loop.scheduler._running
        if count % preempt_every == 0 and running:
            engine.loop.scheduler.preempt(running[count % len(running)].request_id)
    outcomes = engine.run()
    results = {}
    for key, name in names.items():
        assert outcomes[name].finish_reason == "stop", outcomes[name].error
        results[key] = outcomes[name].pooled
        assert results[key] is not None
        assert results[key].dtype == np.float32
    return results


def check(results: dict[tuple[str, int], np.ndarray]) -> None:
    for (kind, index), values in results.items():
        wanted = expected(kind, index)
        assert values.shape == wanted.shape, (kind, index)
        np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-5, err_msg=f"{kind} {index}")
        if values.size and KINDS[kind].task != "token_classify":
            assert cosine(values, wanted) > 0.9999


@functools.cache
def alone() -> dict[tuple[str, int], np.ndarray]:
    """Each request by itself, whole, with kernels of one order of summation."""
    engine = TinyEngine(
        FOLDER(), runner="auto", max_num_seqs=1, enable_prefix_caching=False, **INVARIANT
    )
    return run(engine)


def check_bits(results: dict[tuple[str, int], np.ndarray]) -> None:
    for key, values in results.items():
        np.testing.assert_array_equal(values, alone()[key], err_msg=str(key))


@pytest.mark.parametrize("chunk", [1, 3, 10, 0])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_every_chunking_is_transformers(device, chunk):
    engine = TinyEngine(
        FOLDER(),
        device=device,
        runner="auto",
        max_num_seqs=16,
        long_prefill_token_threshold=chunk,
        num_blocks=256,
    )
    check(run(engine))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 0])
def test_bits_of_chunks_and_depths(depth, chunk):
    engine = TinyEngine(
        FOLDER(),
        device="fake",
        runner="auto",
        max_num_seqs=7,
        max_steps_in_flight=depth,
        long_prefill_token_threshold=chunk,
        num_blocks=128,
        **INVARIANT,
    )
    check_bits(run(engine))


def test_a_request_alone_is_transformers():
    check(alone())


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_preempted_and_resumed(caching, every):
    engine = TinyEngine(
        FOLDER(),
        device="fake",
        runner="auto",
        max_num_seqs=6,
        long_prefill_token_threshold=3,
        num_blocks=64,
        enable_prefix_caching=caching,
        **INVARIANT,
    )
    check_bits(run(engine, preempt_every=every, indices=(1, 4, 5)))
    assert engine.loop.scheduler.stats.num_preemptions > 4


def test_a_pool_too_small_for_all():
    engine = TinyEngine(
        FOLDER(), device="queued", runner="auto", max_num_seqs=12, num_blocks=24, **INVARIANT
    )
    check_bits(run(engine))


def test_from_host_pages():
    """What was computed of a preempted prompt comes back, for a method that it is of use to."""
    engine = TinyEngine(
        FOLDER(),
        device="fake",
        runner="auto",
        max_num_seqs=6,
        long_prefill_token_threshold=5,
        num_blocks=64,
        enable_prefix_caching=False,
        num_host_pages=64,
        **INVARIANT,
    )
    for kind in ("last", "mean", "tokens"):
        before = engine.loop.scheduler.stats.num_restored_tokens
        name = engine.add(PROMPTS[6], KINDS[kind])
        for _ in range(5):
            engine.step()
        assert engine.loop.scheduler.preempt(name)
        np.testing.assert_array_equal(engine.run()[name].pooled, alone()[kind, 6])
        restored = engine.loop.scheduler.stats.num_restored_tokens - before
        assert (restored > 0) == (kind == "last")


@pytest.mark.parametrize("size", [(6, 64), (3, 17)])
def test_padded_sizes(size):
    def choose(live: Descriptor) -> Descriptor:
        return padded(*size)(live)

    engine = TinyEngine(
        FOLDER(),
        device="fake",
        runner="auto",
        max_num_seqs=6,
        choose=choose,
        num_blocks=128,
        **INVARIANT,
    )
    check_bits(run(engine))


@pytest.mark.parametrize("shared", [7, 8, 9, 15, 16, 17])
def test_prefix_hits(shared):
    """Blocks of 4: the last token's state needs nothing of what a hit skips, the others need it."""
    engine: Any = TinyEngine(FOLDER(), runner="auto", num_blocks=128)
    prompt = PROMPTS[5]
    engine.pool([[*prompt[:shared], *PROMPTS[6][:5]]], KINDS["mean"])
    for kind in ("last", "classify", "cls", "mean", "tokens", "step"):
        name = engine.add(prompt, KINDS[kind])
        values = engine.run()[name].pooled
        wanted = expected(kind, 5)
        np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=1e-5)
        hits = engine.outcomes[name].request.num_cached_tokens
        if kind == "last":
            assert hits == shared // 4 * 4
        elif kind == "classify":
            assert hits == 36  # by now all of the prompt but its last token
        else:
            assert hits == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """A checkpoint made for tokens, whose head is left out."""
    folder = folder_of(family)
    engine = TinyEngine(
        folder,
        device="queued",
        runner="pooling",
        long_prefill_token_threshold=3,
        num_blocks=128,
    )
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[4]]
    asked = [PoolingParams(), PoolingParams(task="token_embed")]
    results = engine.pool([*prompts, *prompts], [one for one in asked for _ in prompts])
    hidden = [hidden_states(folder, prompt) for prompt in prompts]
    for values, wanted in zip(results, [*(states[-1] for states in hidden), *hidden]):
        assert cosine(values, wanted) > 0.9999


@pytest.mark.parametrize("ending", ["embed", "classify", "token_classify"])
@pytest.mark.parametrize("family", ["Gemma3Text", "Llama", "Qwen3Moe", "Phi3"])
def test_endings(family, ending):
    """As AutoModel and its kin save them, with names of their own."""
    overrides = next((o for name, o in FAMILIES.values() if name == family), {})
    changes = {} if ending == "embed" else {"num_labels": 3}
    try:
        folder = tiny_pooled(family, ending, tuple(overrides.items()), **changes)
    except ValueError:
        pytest.skip("transformers has no such class")
    engine = TinyEngine(folder, runner="auto", num_blocks=128)
    params = PoolingParams(use_activation=False)
    for prompt, values in zip(PROMPTS, engine.pool(PROMPTS, params)):
        if ending == "embed":
            wanted = hidden_states(folder, prompt)[-1]
        else:
            wanted = scores(folder, prompt, ending)
        np.testing.assert_allclose(values, wanted, rtol=1e-3, atol=1e-4)
