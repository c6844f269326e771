"""The invariance list: a request's tokens do not depend on how the engine runs it.

Everything is compared with the plain engine (alone, reference attention, depth 1, no prefix cache),
and greedily with transformers. Equality is promised where arithmetic decides it: the first test
shows that no choice in this fixture is so close that the last bits of a logit could turn it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.logits import hook_logits
from support.plain import KINDS, check_plain, greedy, logprobs_of, plain_tokens, seeded
from support.tiny import TinyEngine, oracle_greedy, prompts_of, tiny_llama

from pelton.core.descriptor import Descriptor
from pelton.device.native.library import library

LENGTHS = (1, 3, 8, 12, 21, 37)
PROMPTS = prompts_of(LENGTHS, seed=11)
BACKENDS = {
    "torch": {"attention_backend": "torch"},
    **({} if library() is None else {"native": {"attention_backend": "native"}}),
    "invariant": {"attention_backend": "invariant", "batch_invariant": True},
}
DEVICES = ("cpu", "queued", "fake")


def check_all(engine: TinyEngine) -> None:
    check_plain(engine, PROMPTS)


def test_fixture_has_no_near_ties():
    """Logits moved by more than any two ways of summing differ give the same tokens: so the tests
    below compare what is decided, in sampling with a seed too."""
    generator = torch.Generator().manual_seed(0)
    engine = TinyEngine(
        tiny_llama(), attention_backend="reference", max_steps_in_flight=1, max_num_seqs=12
    )

    def shake(logits: torch.Tensor) -> None:
        logits.add_((torch.rand(logits.shape, generator=generator) - 0.5) * 4e-4)

    hook_logits(engine.worker.model, shake)
    for _ in range(3):
        check_all(engine)


def test_greedy_tokens_equal_transformers():
    for prompt in PROMPTS:
        assert plain_tokens(prompt, greedy()) == oracle_greedy(tiny_llama(), prompt, 12)


def test_seeds_matter():
    """Without this, equal seeded tokens would prove nothing."""
    answers = {tuple(plain_tokens(PROMPTS[3], seeded(), seed=seed)) for seed in range(8)}
    assert len(answers) == 8
    assert tuple(plain_tokens(PROMPTS[3], greedy())) not in answers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_depths_and_devices(device, depth, backend):
    engine = TinyEngine(tiny_llama(), device=device, max_steps_in_flight=depth, **BACKENDS[backend])
    check_all(engine)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind, backend):
    engine = TinyEngine(tiny_llama(), device="queued", **BACKENDS[backend])
    for index, prompt in enumerate(PROMPTS):
        name = engine.add(prompt, KINDS[kind](), seed=index)
        expected = plain_tokens(prompt, KINDS[kind](), seed=index)
        assert engine.run()[name].token_ids == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("kind", KINDS)
def test_among_sixteen_others(kind, device, backend):
    """Others come before, with and after it, of all lengths and kinds, and all are right."""
    engine = TinyEngine(
        tiny_llama(), device=device, max_num_seqs=17, num_blocks=300, **BACKENDS[backend]
    )
    others = prompts_of([1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 20, 25, 31, 32, 40], seed=2)
    expected = {}

    def add(prompt: list[int], params: Any, seed: int) -> None:
        expected[engine.add(prompt, params, seed=seed)] = plain_tokens(prompt, params, seed=seed)

    for index, prompt in enumerate(others):
        if index == 8:
            add(PROMPTS[4], KINDS[kind](), 3)
        add(prompt, (greedy if index % 2 else seeded)(5 + index), index)
        if index % 3 == 0:
            engine.step()
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_chunk_sizes(limit, chunk, backend):
    engine = TinyEngine(tiny_llama(), device="queued", **{limit: chunk}, **BACKENDS[backend])
    check_all(engine)


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunk_sizes_on_the_fake_device(chunk):
    check_all(TinyEngine(tiny_llama(), device="fake", long_prefill_token_threshold=chunk))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hit", [3, 4, 5, 11, 12, 13, 19, 20, 21])
def test_prefix_hits(hit, backend):
    """Another request has left the first `hit` tokens: k * block - 1, k * block, k * block + 1."""
    engine = TinyEngine(tiny_llama(), device="queued", **BACKENDS[backend])
    for kind, make in KINDS.items():
        assert engine.loop.scheduler.reset_prefix_cache()
        engine.add(PROMPTS[5][:hit], greedy(1))
        engine.run()
        name = engine.add(PROMPTS[5], make(), seed=4)
        outcome = engine.run()[name]
        assert outcome.request.num_cached_tokens == hit // 4 * 4
        assert outcome.token_ids == plain_tokens(PROMPTS[5], make(), seed=4), kind


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("length", [4, 8, 12, 11, 13])
def test_same_prompt_again(length, device):
    """Case 9: fully cached prompts of k * block tokens still compute their last token."""
    (prompt,) = prompts_of([length], seed=length)
    engine = TinyEngine(tiny_llama(), device=device)
    for round_number in range(3):
        names = {engine.add(prompt, make(), seed=1): make for make in KINDS.values()}
        outcomes = engine.run()
        for name, make in names.items():
            assert outcomes[name].token_ids == plain_tokens(prompt, make(), seed=1)
            if round_number:
                assert outcomes[name].request.num_cached_tokens == (length - 1) // 4 * 4


def preempt_at(device: str, k: int, make: Any, **changes: Any) -> None:
    """Two requests; the one that is watched is sent back after k steps."""
    engine = TinyEngine(tiny_llama(), device=device, long_prefill_token_threshold=3, **changes)
    neighbour = engine.add(PROMPTS[2], greedy(9))
    name = engine.add(PROMPTS[3], make(9), seed=5)
    for _ in range(k):
        engine.step()
    was_running = engine.loop.scheduler.preempt(name)
    outcomes = engine.run()
    assert outcomes[name].request.num_preemptions == int(was_running)
    assert outcomes[name].token_ids == plain_tokens(PROMPTS[3], make(9), seed=5), k
    assert outcomes[neighbour].token_ids == plain_tokens(PROMPTS[2], greedy(9)), k


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_at_every_step(kind, caching):
    """Prefill takes 4 steps and decode 8: k covers both, the first decode, and the drain."""
    for k in range(1, 15):
        preempt_at("queued", k, KINDS[kind], enable_prefix_caching=caching)


@pytest.mark.long
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_at_every_step_with_the_invariant_backend(kind, caching):
    for k in range(1, 15):
        preempt_at("queued", k, KINDS[kind], enable_prefix_caching=caching, **BACKENDS["invariant"])


@pytest.mark.parametrize(("kind", "depth"), [("seeded", 2), ("greedy", 3)])
def test_preempted_at_every_step_on_the_fake_device(kind, depth):
    for k in range(1, 15):
        preempt_at("fake", k, KINDS[kind], max_steps_in_flight=depth)


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_preempted_again_and_again(device):
    engine = TinyEngine(tiny_llama(), device=device, long_prefill_token_threshold=3)
    names = {
        engine.add(PROMPTS[3], make(), seed=5): plain_tokens(PROMPTS[3], make(), seed=5)
        for make in KINDS.values()
    }
    for count in range(400):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 7 == 6:
            for name in names:
                engine.loop.scheduler.preempt(name)
    outcomes = engine.run()
    for name, tokens in names.items():
        assert outcomes[name].request.num_preemptions > 1
        assert outcomes[name].token_ids == tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("num_blocks", [14, 16, 20])
def test_pools_that_force_preemption(num_blocks, device, backend):
    engine = TinyEngine(
        tiny_llama(),
        device=device,
        num_blocks=num_blocks,
        long_prefill_token_threshold=5,
        **BACKENDS[backend],
    )
    check_all(engine)
    assert engine.loop.scheduler.stats.num_preemptions > 0


def to_largest(live: Descriptor) -> Descriptor:
    return replace(live, num_rows=4, num_tokens=64)


def to_next_power(live: Descriptor) -> Descriptor:
    rows = min(4, 1 << (live.num_rows - 1).bit_length())
    return replace(live, num_rows=rows, num_tokens=min(64, 1 << (live.num_tokens - 1).bit_length()))


def to_four_rows(live: Descriptor) -> Descriptor:
    return replace(live, num_rows=4)


def to_longer(live: Descriptor) -> Descriptor:
    """As a captured graph would: bounds of the longest sequence."""
    return replace(live, num_tokens=min(64, live.num_tokens + 3), max_seq_len=128)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("choose", [to_largest, to_next_power, to_four_rows, to_longer])
def test_padded_sizes(choose, device, backend):
    """Case 7: padding touches nothing."""
    check_all(TinyEngine(tiny_llama(), device=device, choose=choose, **BACKENDS[backend]))


# Bit for bit.

NUM_TOP = 3


def exact(prompt: list[int], make: Any, **changes: Any) -> list[tuple[Any, ...]]:
    engine = TinyEngine(tiny_llama(), **{**BACKENDS["invariant"], **changes})
    name = engine.add(prompt, make(logprobs=NUM_TOP), seed=4)
    engine.run()
    return logprobs_of(engine, name)


def variations(make: Any, **changes: Any) -> dict[str, list[tuple[Any, ...]]]:
    """The same request in every company, by name."""
    prompt, params = PROMPTS[5], make(logprobs=NUM_TOP)
    found = {}
    for chunk in (1, 3, 16):
        found[f"chunk {chunk}"] = exact(prompt, make, max_num_batched_tokens=chunk, **changes)
    for device, depth in (("queued", 2), ("fake", 3)):
        found[device] = exact(prompt, make, device=device, max_steps_in_flight=depth, **changes)

    engine = TinyEngine(tiny_llama(), max_num_seqs=17, num_blocks=200, **changes)
    for index, other in enumerate(prompts_of(range(1, 17), seed=8)):
        engine.add(other, (seeded if index % 2 else greedy)(20, logprobs=index % 5))
    name = engine.add(prompt, params, seed=4)
    engine.run()
    found["neighbours"] = logprobs_of(engine, name)

    for hit in (3, 4, 5, 19, 20, 21):
        engine = TinyEngine(tiny_llama(), **changes)
        engine.add(prompt[:hit], greedy(1))
        engine.run()
        name = engine.add(prompt, params, seed=4)
        engine.run()
        assert engine.outcomes[name].request.num_cached_tokens == hit // 4 * 4
        found[f"hit {hit}"] = logprobs_of(engine, name)

    for k in (1, 2, 4, 8, 11):
        engine = TinyEngine(
            tiny_llama(), device="queued", long_prefill_token_threshold=16, **changes
        )
        engine.add(PROMPTS[2], greedy(20))
        name = engine.add(prompt, params, seed=4)
        for _ in range(k):
            engine.step()
        assert engine.loop.scheduler.preempt(name)
        engine.run()
        found[f"preempted at {k}"] = logprobs_of(engine, name)
    for choose in (to_largest, to_next_power, to_longer):
        found[choose.__name__] = exact(prompt, make, choose=choose, **changes)
    return found


@pytest.mark.parametrize("kind", ["greedy", pytest.param("seeded", marks=pytest.mark.long)])
def test_batch_invariant_is_bitwise(kind):
    make = KINDS[kind]
    expected = exact(PROMPTS[5], make)
    assert len(expected) == 12
    for name, rows in variations(make, **BACKENDS["invariant"]).items():
        assert rows == expected, name


def test_without_batch_invariant_last_bits_differ():
    """So the test above can fail."""
    alone = exact(PROMPTS[5], greedy, attention_backend="torch", batch_invariant=False)
    found = variations(greedy, attention_backend="torch", batch_invariant=False)
    for rows in found.values():
        assert [row[2][0] for row in rows] == [row[2][0] for row in alone]
    assert any(rows != alone for rows in found.values())
