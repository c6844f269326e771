"""Steps that are replayed give the tokens of steps that are not: the invariance list again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from compose.test_families import FAMILIES
from compose.test_invariance import PROMPTS, exact, preempt_at
from compose.test_speculation import PROMPTS as REPEATING
from compose.test_speculation import engine_with
from compose.test_speculation import plain_tokens as plain_few
from support.families import BACKENDS, tiny_model
from support.plain import KINDS, greedy, plain_tokens, seeded
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.config.params import SamplingParams
from pelton.device.native.library import library
from pelton.forward.recorded import RecordedExecutor

GRAPHS = {
    "every size": GraphsConfig(every_decode_size=True),
    "ladders": GraphsConfig(decode_sizes=(1, 2, 4), token_sizes=(16, 64)),
}
DEVICES = ("cpu", "queued", "fake")


def recorded(engine: TinyEngine) -> RecordedExecutor:
    executor = engine.worker._assembled.runner._executor
    assert isinstance(executor, RecordedExecutor)
    return executor


def drawn(num_tokens: int = 12) -> SamplingParams:
    """By temperature alone: as plain as greedy."""
    return SamplingParams(temperature=0.8, max_tokens=num_tokens, ignore_eos=True)


def check(
    engine: TinyEngine, makes: Sequence[Callable[..., SamplingParams]] = (greedy, seeded)
) -> None:
    """The prompts together, twice, so that recordings made of one step serve others."""
    for _ in range(2):
        expected = {}
        for index, prompt in enumerate(PROMPTS):
            for make in makes:
                expected[engine.add(prompt, make(), seed=index)] = plain_tokens(
                    prompt, make(), seed=index
                )
        outcomes = engine.run()
        for name, tokens in expected.items():
            assert outcomes[name].token_ids == tokens, name
    assert recorded(engine).num_replayed > 20


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_devices_and_backends(device, backend, graphs):
    check(TinyEngine(tiny_llama(), device=device, graphs=GRAPHS[graphs], **BACKENDS[backend]))


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("device", DEVICES)
def test_plain_rows_are_sampled_in_the_recording(device, graphs):
    engine = TinyEngine(tiny_llama(), device=device, graphs=GRAPHS[graphs])
    steps = recorded(engine)._steps
    check(engine, (greedy, drawn))
    assert steps
    assert all(is_sampled for _, is_sampled in steps)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_rows_that_are_not_plain_keep_others_from_being_so(graphs):
    """And the head of a step that is replayed without one still serves every option."""
    engine = TinyEngine(tiny_llama(), device="fake", graphs=GRAPHS[graphs])
    options: list[dict[str, Any]] = [
        {},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"presence_penalty": 1.5},
        {"logit_bias": {5: 100.0}},
        {"min_tokens": 6, "stop_token_ids": [7]},
    ]
    other = TinyEngine(tiny_llama(), device="cpu")
    names = []
    for index, option in enumerate(options):
        params = greedy(12, **option)
        names.append((engine.add(PROMPTS[3], params, seed=index), other.add(PROMPTS[3], params)))
    ours, theirs = engine.run(), other.run()
    assert [ours[a].token_ids for a, _ in names] == [theirs[b].token_ids for _, b in names]
    assert len(ours[names[1][0]].logprobs) == 12


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("graphs", GRAPHS)
def test_depths(graphs, depth):
    check(TinyEngine(tiny_llama(), device="fake", max_steps_in_flight=depth, graphs=GRAPHS[graphs]))


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunk_sizes(chunk):
    check(
        TinyEngine(
            tiny_llama(),
            device="queued",
            graphs=GRAPHS["ladders"],
            long_prefill_token_threshold=chunk,
        )
    )


@pytest.mark.parametrize("hit", [3, 4, 5, 19, 20, 21])
def test_prefix_hits(hit):
    engine = TinyEngine(tiny_llama(), device="fake", graphs=GRAPHS["ladders"])
    for make in KINDS.values():
        assert engine.loop.scheduler.reset_prefix_cache()
        engine.add(PROMPTS[5][:hit], greedy(1))
        engine.run()
        name = engine.add(PROMPTS[5], make(), seed=4)
        assert engine.run()[name].token_ids == plain_tokens(PROMPTS[5], make(), seed=4)
        assert engine.outcomes[name].request.num_cached_tokens == hit // 4 * 4


@pytest.mark.parametrize("graphs", GRAPHS)
def test_preempted_at_every_step(graphs):
    for k in range(1, 15):
        preempt_at("fake", k, KINDS["greedy"], graphs=GRAPHS[graphs])


def test_pools_that_force_preemption():
    engine = TinyEngine(
        tiny_llama(),
        device="fake",
        num_blocks=16,
        long_prefill_token_threshold=5,
        graphs=GRAPHS["ladders"],
    )
    check(engine)
    assert engine.loop.scheduler.stats.num_preemptions > 0


def test_among_sixteen_others():
    engine = TinyEngine(
        tiny_llama(),
        device="fake",
        max_num_seqs=17,
        num_blocks=300,
        graphs=GraphsConfig(decode_sizes=(1, 2, 4, 8, 17), token_sizes=(16, 64)),
    )
    expected = {}
    others = prompts_of([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 20, 25, 31, 32, 40], seed=2)
    for index, prompt in enumerate([*others, PROMPTS[4]]):
        params = (greedy if index % 2 else seeded)(5 + index)
        name = engine.add(prompt, params, seed=index)
        expected[name] = plain_tokens(prompt, params, seed=index)
        if index % 3 == 0:
            engine.step()
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


@pytest.mark.parametrize("graphs", GRAPHS)
def test_bit_for_bit(graphs):
    for device in ("cpu", "fake"):
        found = exact(PROMPTS[5], greedy, device=device, graphs=GRAPHS[graphs])
        assert found == exact(PROMPTS[5], greedy)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("fake", 3)])
def test_drafts(device, depth, graphs, num_drafts):
    engine = engine_with(
        num_drafts, device=device, max_steps_in_flight=depth, graphs=GRAPHS[graphs]
    )
    expected = {}
    for index, prompt in enumerate(REPEATING):
        for make in KINDS.values():
            name = engine.add(prompt, make(16), seed=index)
            expected[name] = plain_few(prompt, make(16), seed=index)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name
    lengths = {shape.uniform_query_len for shape, _ in recorded(engine)._steps}
    assert 1 + num_drafts in lengths


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_families(architecture):
    """Windows, recurrent states, experts, sinks and soft caps among them."""
    family, overrides = FAMILIES[architecture]
    folder = tiny_model(family, **overrides)
    engine = TinyEngine(folder, device="fake", graphs=GRAPHS["ladders"])
    expected = {}
    for index, prompt in enumerate(PROMPTS[1:5]):
        for make in KINDS.values():
            name = engine.add(prompt, make(), seed=index)
            expected[name] = plain_tokens(prompt, make(), seed=index, folder=folder)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name
    assert recorded(engine).num_replayed > 5


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_quantised_keys_and_values(kv_dtype):
    engine = TinyEngine(tiny_llama(), device="fake", kv_dtype=kv_dtype, graphs=GRAPHS["ladders"])
    names = {engine.add(prompt): prompt for prompt in PROMPTS}
    outcomes = engine.run()
    for name, prompt in names.items():
        expected = plain_tokens(prompt, greedy(), kv_dtype=kv_dtype)
        assert outcomes[name].token_ids == expected


def test_a_number_of_one_step_in_a_recording_would_be_seen(monkeypatch):
    """The comparisons above can fail: a kernel that is given a live length is wrong in the next
    step."""
    from pelton.attention import paged

    monkeypatch.setattr(
        paged.PagedBackend,
        "_refresh",
        lambda self, meta, batch, group, dtype: _refresh_once(self, meta, batch, group, dtype),
    )
    engine = TinyEngine(tiny_llama(), device="cpu", graphs=GRAPHS["every size"])
    name = engine.add(PROMPTS[3])
    assert engine.run()[name].token_ids != plain_tokens(PROMPTS[3], greedy())


def _refresh_once(self: Any, meta: Any, batch: Any, group: Any, dtype: Any) -> None:
    if batch.is_blank and not meta.prepared.get("is frozen"):
        meta.query_lens, meta.seq_len_bounds = (a.copy() for a in batch.read_lengths())
        meta.num_rows = len(meta.query_lens)
        meta.num_decode_rows = meta.num_rows
        meta.bounds_are_exact = True
        self._prepare(meta, group, dtype)
        meta.prepared["is frozen"] = True
    elif not batch.is_blank:
        self._prepare(meta, group, dtype)


def test_padding_of_a_replay_touches_nothing():
    """Where nobody wrote there is NaN, before and after."""
    engine = TinyEngine(tiny_llama(), device="cpu", graphs=GRAPHS["ladders"])
    pools = recorded(engine)._eager._kv
    with torch.inference_mode():
        for pool in pools:
            pool[1:].fill_(np.nan)
    name = engine.add(PROMPTS[2])
    blocks = set()
    while engine.loop.has_work():
        engine.step()
    assert engine.outcomes[name].token_ids == plain_tokens(PROMPTS[2], greedy())
    for pool in pools:
        written = ~pool.isnan().flatten(1).all(1)
        blocks |= set(written.nonzero()[:, 0].tolist())
    # The null block, and those of 8 + 11 tokens, four each.
    assert len(blocks) == 1 + 5


@pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_by_kernels_of_our_own_is_one_call_and_writes_the_same_bits(dtype):
    """Rows come and go, of other lengths and blocks; one Python call a step would be seen here."""
    engines = [
        TinyEngine(
            tiny_llama(tie_word_embeddings=True),
            device="cpu",
            attention_backend="native",
            dtype=dtype,
            kv_dtype=dtype,
            graphs=graphs,
        )
        for graphs in (GraphsConfig(), GRAPHS["every size"])
    ]
    pools, tokens = [], []
    for engine in engines:
        executor = engine.worker._assembled.runner._executor
        pools.append(getattr(executor, "_eager", executor)._kv)
        with torch.inference_mode():
            for pool in pools[-1]:
                pool.zero_()
        for index, prompt in enumerate(PROMPTS):
            temperature = (0.0, 0.9)[index % 2]
            params = SamplingParams(
                temperature=temperature, max_tokens=5 + 3 * index, ignore_eos=True
            )
            engine.add(prompt, params, seed=index)
        tokens.append([outcome.token_ids for outcome in engine.run().values()])
    assert tokens[0] == tokens[1]
    for left, right in zip(*pools, strict=True):
        assert left.any()
        assert torch.equal(left, right)
    steps = recorded(engines[1])._steps
    assert len(steps) >= 3
    for (_, is_sampled), step in steps.items():
        assert is_sampled
        assert step.recording.num_python_calls == 0
