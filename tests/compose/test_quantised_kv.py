"""The invariance list with quantised keys and values.

A token's codes depend on that token alone, and a chunk reads its own tokens' codes: so quantised
tokens are as independent of company, chunks, hits and lives as exact ones, bit for bit with
batch_invariant=True. Elsewhere the last bits of a key may turn into one code or the next: the first
test shows that no choice of this fixture hangs on such a code.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compose.test_families import GRANITE
from support.families import tiny_model
from support.plain import KINDS, greedy, logprobs_of, plain_tokens, seeded
from support.tiny import TinyEngine, make_config, prompts_of, tiny_llama

from pelton.attention.zeroing import NewBlockZeroing
from pelton.config.params import SamplingParams
from pelton.config.speculation import SpeculationConfig
from pelton.core.descriptor import Descriptor
from pelton.device.native.library import library
from pelton.ops.paged_attention import pages
from pelton.setup.resolve import kv_block_bytes

KV_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
PROMPTS = prompts_of([1, 8, 21, 37], seed=9)
BACKENDS = {
    "torch": {"attention_backend": "torch"},
    "invariant": {"attention_backend": "invariant", "batch_invariant": True},
}
if library() is not None:
    BACKENDS["native"] = {"attention_backend": "native"}
# One full layer and three with windows, whose groups share one pool; a softcap; recurrent layers,
# whose state is not quantised.
FAMILIES: dict[str, Any] = {
    "llama": tiny_llama,
    "windows": functools.partial(
        tiny_model,
        "Qwen2",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
    "softcap": functools.partial(
        tiny_model,
        "Gemma2",
        initializer_range=0.2,
        sliding_window=9,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
    ),
    "recurrent": functools.partial(tiny_model, "GraniteMoeHybrid", **GRANITE),
}
with_each_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)
# Every family with one type, and Llama with each.
CASES = [("llama", kv_dtype) for kv_dtype in KV_DTYPES]
CASES += [("windows", "int8"), ("softcap", "float8_e4m3fn"), ("recurrent", "int8")]
with_each_case = pytest.mark.parametrize(("family", "kv_dtype"), CASES)
on_each = pytest.mark.parametrize("backend", BACKENDS)


def folder_of(family: str) -> Path:
    return FAMILIES[family]()  # type: ignore[no-any-return]


def engine_of(family: str, kv_dtype: str, **changes: Any) -> TinyEngine:
    return TinyEngine(folder_of(family), **{"kv_dtype": kv_dtype, "num_blocks": 300, **changes})


def plain(family: str, kv_dtype: str, index: int, params: SamplingParams) -> list[int]:
    """The plain engine's tokens with such keys and values, of PROMPTS[index] and seed `index`."""
    folder = folder_of(family)
    return plain_tokens(PROMPTS[index], params, seed=index, folder=folder, kv_dtype=kv_dtype)


def check_all(engine: TinyEngine, family: str) -> None:
    """All prompts, greedy and seeded, together."""
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        for make in KINDS.values():
            name = engine.add(prompt, make(6), seed=index)
            expected[name] = plain(family, engine.config.cache.dtype, index, make(6))
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == tokens, name


@with_each_case
def test_fixture_hangs_on_no_code(family, kv_dtype, monkeypatch):
    """Keys and values moved by more than any two ways of summing differ give the same tokens."""
    generator = torch.Generator().manual_seed(0)
    quantise = pages.quantise_kv
    turned = 0

    def shaken(kv: torch.Tensor, *rest: Any) -> torch.Tensor:
        nonlocal turned
        moved = kv * (1 + (torch.rand(kv.shape, generator=generator) - 0.5) * 2e-5)
        rows = quantise(moved, *rest)
        turned += int((rows != quantise(kv, *rest)).sum())
        return rows

    for index in range(len(PROMPTS)):  # the plain tokens, not shaken
        for make in KINDS.values():
            plain(family, kv_dtype, index, make(6))
    monkeypatch.setattr(pages, "quantise_kv", shaken)
    check_all(engine_of(family, kv_dtype, attention_backend="reference"), family)
    # The fp8 types have too few codes for one to turn.
    assert turned > 0 or kv_dtype != "int8"


@with_each_dtype
def test_codes_matter(kv_dtype):
    """Else equal tokens would prove nothing: logits are others than those of exact keys."""
    found = []
    for dtype in (kv_dtype, "float32"):
        engine = engine_of("llama", dtype)
        name = engine.add(PROMPTS[2], greedy(4, logprobs=3))
        engine.run()
        found.append(logprobs_of(engine, name)[0][0])
    assert 1e-3 < abs(found[0] - found[1]) < 1


@with_each_case
@on_each
def test_company_and_chunks(backend, family, kv_dtype):
    for changes in ({"max_num_seqs": 8}, {"long_prefill_token_threshold": 3}):
        check_all(engine_of(family, kv_dtype, **changes, **BACKENDS[backend]), family)


@with_each_dtype
@pytest.mark.parametrize("device", ["queued", "fake"])
def test_depth_and_padding(device, kv_dtype):
    def to_largest(live: Descriptor) -> Descriptor:
        return replace(live, num_rows=4, num_tokens=64)

    engine = engine_of("llama", kv_dtype, device=device, max_steps_in_flight=3, choose=to_largest)
    check_all(engine, "llama")


@with_each_case
def test_prefix_hits(family, kv_dtype):
    """The second round hits what the first has left."""
    engine = engine_of(family, kv_dtype, device="queued")
    check_all(engine, family)
    check_all(engine, family)
    hits = [outcome.request.num_cached_tokens for outcome in engine.outcomes.values()]
    if family != "recurrent":  # what is kept of state for hits is not this file's matter
        assert hits[8:] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS for _ in KINDS]


@with_each_case
def test_preemption(family, kv_dtype):
    """In a pool that is too small for all, and by hand."""
    num_groups = len(engine_of(family, kv_dtype).worker.groups)
    engine = engine_of(
        family,
        kv_dtype,
        device="queued",
        num_blocks=14 * num_groups,
        long_prefill_token_threshold=5,
    )
    names = [engine.add(prompt, seeded(6), seed=i) for i, prompt in enumerate(PROMPTS)]
    preempt = engine.loop.scheduler.preempt
    for count in range(40):
        engine.step()
        if count % 4 == 3:
            any(preempt(name) for name in reversed(names))
    outcomes = engine.run()
    for index, name in enumerate(names):
        assert outcomes[name].token_ids == plain(family, kv_dtype, index, seeded(6)), index
    assert engine.loop.scheduler.stats.num_preemptions >= 3


@with_each_dtype
def test_pages_in_host_memory(kv_dtype):
    """A preempted request's codes and scales come back as they were."""
    engine = engine_of(
        "llama", kv_dtype, device="queued", num_host_pages=64, long_prefill_token_threshold=5
    )
    name = engine.add(PROMPTS[3], seeded(6), seed=3)
    for count in range(30):
        engine.step()
        if count in (4, 9, 12):
            engine.loop.scheduler.preempt(name)
    assert engine.run()[name].token_ids == plain("llama", kv_dtype, 3, seeded(6))
    assert engine.loop.scheduler.stats.num_restored_tokens > 0


@with_each_case
def test_batch_invariant_is_bitwise(family, kv_dtype):
    """Log-probabilities as exact floats."""
    prompt, params = PROMPTS[3], greedy(5, logprobs=3)

    def exact(engine: TinyEngine, num_others: int = 0, preempt_at: int = -1) -> list[Any]:
        for index, other in enumerate(prompts_of(range(3, 3 + num_others), seed=8)):
            engine.add(other, seeded(9), seed=index)
        name = engine.add(prompt, params, seed=4)
        for _ in range(preempt_at):
            engine.step()
        if preempt_at > 0:
            assert engine.loop.scheduler.preempt(name)
        engine.run()
        return logprobs_of(engine, name)

    make = functools.partial(engine_of, family, kv_dtype, **BACKENDS["invariant"])
    alone = exact(make())
    assert len(alone) == 5
    found = {
        "neighbours": exact(make(max_num_seqs=8), 7),
        "chunks": exact(make(device="fake", long_prefill_token_threshold=3), 2),
        "a step's limit": exact(make(max_num_batched_tokens=16)),
    }
    for k in (2, 4):
        engine = make(device="queued", long_prefill_token_threshold=16)
        found[f"preempted at {k}"] = exact(engine, 1, k)
    for hit in (19, 20, 21):
        engine = make()
        engine.add(prompt[:hit], greedy(1))
        engine.run()
        found[f"hit {hit}"] = exact(engine)
    for name, rows in found.items():
        assert rows == alone, name


@with_each_dtype
def test_drafts(kv_dtype):
    """A draft's codes are the token's, whether it is accepted or overwritten."""
    folder = tiny_llama(vocab_size=12)  # of few tokens, so that a text repeats itself
    prompt = [3 + token % 9 for token in prompts_of([7], seed=21)[0]] * 3
    found = []
    for num_drafts in (0, 3):
        engine = TinyEngine(
            folder,
            kv_dtype=kv_dtype,
            speculation=SpeculationConfig(
                method="ngram" if num_drafts else None,
                num_speculative_tokens=num_drafts,
                prompt_lookup_min=1,
                prompt_lookup_max=3,
            ),
            **BACKENDS["invariant"],
        )
        name = engine.add(prompt, seeded(16, logprobs=3))
        engine.run()
        found.append(logprobs_of(engine, name))
    assert found[0] == found[1]
    stats = engine.loop.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def tokens_after_poison(backend: str, kv_dtype: str, device: str) -> list[list[int]]:
    """Greedy tokens of all prompts, in an engine whose free blocks hold scales of NaN."""
    changes = BACKENDS.get(backend, {"attention_backend": backend})
    engine = engine_of("llama", kv_dtype, device=device, **changes)
    with torch.inference_mode():
        for pool in engine.worker._assembled.runner._executor._kv:
            engine.device.launch(torch.Tensor.fill_, pool[1:], 255)
    names = [engine.add(prompt, greedy(6), seed=i) for i, prompt in enumerate(PROMPTS)]
    outcomes = engine.run()
    return [outcomes[name].token_ids for name in names]


@with_each_dtype
@pytest.mark.parametrize(
    ("backend", "device"),
    [("torch", "cpu"), ("torch", "fake"), ("reference", "cpu"), ("invariant", "cpu")]
    + [("native", "cpu")] * ("native" in BACKENDS),
)
def test_what_a_former_owner_left_is_not_seen(backend, device, kv_dtype):
    """Relative of case 19: codes and scales of blocks that are used again."""
    expected = [plain("llama", kv_dtype, index, greedy(6)) for index in range(len(PROMPTS))]
    assert tokens_after_poison(backend, kv_dtype, device) == expected


def test_without_zeroing_it_is_seen(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(NewBlockZeroing, "before_forward", lambda self, batch: None)
    expected = [plain("llama", "int8", index, greedy(6)) for index in range(len(PROMPTS))]
    assert tokens_after_poison("torch", "int8", "cpu") != expected


@with_each_dtype
def test_bad_numbers_end_their_request_alone(kv_dtype):
    """Relative of case 20: NaN keys and values stay NaN, whatever codes they become."""
    engine = engine_of("llama", kv_dtype, max_num_seqs=2)
    bad_token = 17
    with torch.inference_mode():
        engine.worker.model.embedding.weight.tensor[bad_token] = math.nan
    bad = engine.add([5, 6, bad_token, 8, 9])
    good = engine.add(PROMPTS[1], greedy(6), seed=1)
    outcomes = engine.run()
    assert outcomes[bad].finish_reason == "error"
    assert outcomes[good].token_ids == plain("llama", kv_dtype, 1, greedy(6))


@with_each_case
def test_pools_take_the_bytes_that_were_planned(family, kv_dtype):
    """About a quarter of float32's: a byte a number, and two a head of 16 for its scale."""
    sizes = {}
    for dtype in (kv_dtype, "float32"):
        engine = engine_of(family, dtype, num_blocks=20)
        pools = engine.worker._assembled.runner._executor._kv
        unique = {pool.data_ptr(): pool.numel() * pool.element_size() for pool in pools}
        sizes[dtype] = sum(unique.values())
        layers = [x for x in engine.worker.model.kv_layers(4) if x.kind != "recurrent"]
        assert {layer.scale_dtype for layer in layers} == (
            {None} if dtype == "float32" else {"bfloat16"}
        )
    assert sizes[kv_dtype] * 4 * 16 == sizes["float32"] * (16 + 2)
    config = make_config(folder_of(family), kv_dtype=kv_dtype, num_blocks=20)
    assert sizes[kv_dtype] == 20 * kv_block_bytes(config.model, 4, kv_dtype)
