"""The invariance list with preempted requests' KV in host memory: same tokens, fewer computed."""

from __future__ import annotations

from typing import Any

import pytest
from compose.test_speculation import PROMPTS as REPEATING
from compose.test_speculation import engine_with, few_tokens
from compose.test_windows import FAMILIES, cases, folder_of
from support.plain import KINDS, check_plain, greedy, logprobs_of, plain_tokens, seeded
from support.tiny import (
    GREEDY,
    TinyEngine,
    checkpoint_of,
    make_config,
    prompts_of,
    tiny_llama,
)

from pelton.core.kv.host_pages import MoveCosts
from pelton.engine.loop import EngineLoop
from pelton.worker.worker import Worker

LENGTHS = (1, 3, 8, 12, 21, 37)
PROMPTS = prompts_of(LENGTHS, seed=11)
INVARIANT = {"attention_backend": "invariant", "batch_invariant": True}
PAGES = {"num_host_pages": 64}


def check_pages(engine: TinyEngine) -> None:
    """They were used, and all are free again."""
    host = engine.loop.scheduler._kv.host
    assert host.num_free == host.num_pages
    assert host.num_saved_tokens > 0


def check_counts(engine: TinyEngine) -> None:
    """Nothing whose KV was known has been computed again."""
    check_pages(engine)
    stats = engine.loop.scheduler.stats
    assert stats.num_restored_tokens > 0
    assert stats.num_recomputed_tokens == 0


def run_preempted(engine: TinyEngine, name: str, every: int) -> None:
    """Send the request back after every few steps, as long as it gets anywhere."""
    for count in range(1, 400):
        if not engine.loop.has_work():
            return
        engine.step()
        if count % every == 0 and count < 200:
            engine.loop.scheduler.preempt(name)
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_at_every_step(kind, caching):
    """Case 2. Prefill takes 4 steps and decode 8: k covers both, the first decode, the drain."""
    num_restored = 0
    for k in range(1, 15):
        engine = TinyEngine(
            tiny_llama(),
            device="queued",
            long_prefill_token_threshold=3,
            enable_prefix_caching=caching,
            **PAGES,
        )
        neighbour = engine.add(PROMPTS[2], greedy(9))
        name = engine.add(PROMPTS[3], KINDS[kind](9), seed=5)
        for _ in range(k):
            engine.step()
        was_running = engine.loop.scheduler.preempt(name)
        outcomes = engine.run()
        assert outcomes[name].request.num_preemptions == int(was_running)
        assert outcomes[name].token_ids == plain_tokens(PROMPTS[3], KINDS[kind](9), seed=5), k
        assert outcomes[neighbour].token_ids == plain_tokens(PROMPTS[2], greedy(9)), k
        stats = engine.loop.scheduler.stats
        assert stats.num_recomputed_tokens == 0
        num_restored += stats.num_restored_tokens
    assert num_restored > (10 if caching else 50)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_again_and_again(kind, device, depth):
    """Every life is shorter than the prompt would take to be computed again."""
    engine = TinyEngine(
        tiny_llama(),
        device=device,
        max_steps_in_flight=depth,
        long_prefill_token_threshold=3,
        enable_prefix_caching=False,
        **PAGES,
    )
    name = engine.add(PROMPTS[5], KINDS[kind](), seed=5)
    run_preempted(engine, name, every=2 * depth + 1)
    outcome = engine.outcomes[name]
    assert outcome.request.num_preemptions >= 4
    assert outcome.token_ids == plain_tokens(PROMPTS[5], KINDS[kind](), seed=5)
    check_counts(engine)


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariant_is_bitwise(kind, chunk):
    make = KINDS[kind]

    def rows(**changes: Any) -> list[tuple[Any, ...]]:
        engine = TinyEngine(tiny_llama(), **INVARIANT, **changes)
        engine.add(PROMPTS[2], greedy(20))
        name = engine.add(PROMPTS[5], make(logprobs=3), seed=4)
        if changes:
            run_preempted(engine, name, every=4)
            check_counts(engine)
        else:
            engine.run()
        return logprobs_of(engine, name)

    plain = rows()
    assert len(plain) == 12
    for device in ("queued", "fake"):
        found = rows(
            device=device,
            max_num_batched_tokens=chunk,
            max_num_seqs=min(chunk, 4),
            enable_prefix_caching=False,
            **PAGES,
        )
        assert found == plain, device


@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("num_blocks", [14, 16, 20])
def test_pools_that_force_preemption(num_blocks, device):
    """Everybody is right, and what is computed is what must be: nothing twice."""
    counts = {}
    for num_host_pages in (0, 64):
        engine = TinyEngine(
            tiny_llama(),
            device=device,
            num_blocks=num_blocks,
            num_host_pages=num_host_pages,
            long_prefill_token_threshold=5,
            enable_prefix_caching=False,
        )
        check_plain(engine, PROMPTS)
        stats = engine.loop.scheduler.stats
        assert stats.num_preemptions > 0
        counts[num_host_pages] = stats.num_scheduled_tokens, stats.num_recomputed_tokens
    check_counts(engine)
    assert counts[0][1] > 10
    assert counts[64][1] == 0
    assert counts[64][0] < counts[0][0]


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_with_drafts(num_drafts, device, depth):
    """Rejected drafts' keys may stand in a saved block, behind the tokens that count."""
    engine = engine_with(
        num_drafts,
        device=device,
        max_steps_in_flight=depth,
        enable_prefix_caching=False,
        **PAGES,
    )
    expected = {}
    for index, prompt in enumerate(REPEATING):
        for make in KINDS.values():
            name = engine.add(prompt, make(16), seed=index)
            expected[name] = plain_tokens(prompt, make(16), seed=index, folder=few_tokens())
    for count in range(400):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 7 == 6:
            for name in expected:
                engine.loop.scheduler.preempt(name)
    for name, tokens in expected.items():
        assert engine.outcomes[name].token_ids == tokens, name
    assert engine.loop.scheduler.stats.num_accepted_tokens > 0
    check_counts(engine)


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("name", FAMILIES)
def test_windows(name, device):
    """Blocks left of the window are the null block, before and after."""
    engine = TinyEngine(
        folder_of(name),
        device=device,
        num_blocks=200,
        enable_prefix_caching=False,
        num_host_pages=200,
    )
    names = [engine.add(prompt, GREEDY) for prompt, _ in cases(name)]
    for count in range(200):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 5 == 4:
            for request in names:
                engine.loop.scheduler.preempt(request)
    for request, (_, tokens) in zip(names, cases(name)):
        assert engine.outcomes[request].token_ids == tokens
    check_counts(engine)


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_an_abort_in_mid_prefill_leaves_nothing(chunks, device):
    """Case 12, with pages: aborted when its KV is half saved, half restored; then others get its
    blocks and its pages, and the same prompt comes again."""
    (prompt,) = prompts_of([40], seed=3)
    engine = TinyEngine(tiny_llama(), device=device, max_num_batched_tokens=8, **PAGES)
    name = engine.add(prompt, greedy())
    for _ in range(2 * chunks):
        engine.step()
    if engine.loop.scheduler.preempt(name) and chunks % 2:
        engine.step()
    engine.loop.abort(name)
    others = [engine.add(other, seeded(), seed=1) for other in prompts_of([30, 41], seed=4)]
    for count in range(6):
        engine.step()
        engine.loop.scheduler.preempt(others[count % 2])
    again = engine.add(prompt, greedy())
    outcomes = engine.run()
    assert outcomes[again].token_ids == plain_tokens(prompt, greedy())
    for other, ids in zip(others, prompts_of([30, 41], seed=4)):
        assert outcomes[other].token_ids == plain_tokens(ids, seeded(), seed=1)
    check_pages(engine)


def test_what_is_measured_at_start_decides():
    """A worker that is given no costs times them; the scheduler goes by its worker's."""
    config = make_config(tiny_llama(), num_host_pages=8)
    measured = Worker(config, checkpoint_of(tiny_llama())).move_costs
    assert measured.per_token > 0
    assert measured.per_page + measured.per_move > 0
    engine = TinyEngine(tiny_llama(), num_host_pages=8)
    engine.worker.move_costs = MoveCosts(per_token=1e-9, per_page=1.0)
    engine.loop = EngineLoop(engine.config, engine.worker)
    name = engine.add(PROMPTS[3])
    for _ in range(4):
        engine.step()
    assert engine.loop.scheduler.preempt(name)
    engine.run()
    assert engine.loop.scheduler.stats.num_saved_tokens == 0
    assert engine.outcomes[name].token_ids == plain_tokens(PROMPTS[3], GREEDY)
