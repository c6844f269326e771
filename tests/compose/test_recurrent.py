"""Models with recurrent layers: what a state per row adds to the invariance list.

tests/compose/test_families.py has the list itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compose.test_families import GRANITE
from compose.test_invariance import to_four_rows, to_largest, to_longer, to_next_power
from support import plain
from support.drafters import VOCAB, CountingDrafter, ScriptedDrafter
from support.families import engine_logits, tiny_model
from support.plain import KINDS, greedy, seeded
from support.tiny import TinyEngine, assert_greedy, oracle_logits, prompts_of

from pelton.config.speculation import SpeculationConfig
from pelton.core.descriptor import Descriptor
from pelton.speculation import table

INVARIANT = {"attention_backend": "invariant", "batch_invariant": True}
BACKENDS = {"torch": {"attention_backend": "torch"}, "invariant": INVARIANT}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PADDINGS = (to_largest, to_next_power, to_four_rows, to_longer)


def folder() -> Path:
    return tiny_model("GraniteMoeHybrid", **GRANITE)


def few_tokens() -> Path:
    """Texts that repeat themselves."""
    return tiny_model("GraniteMoeHybrid", **GRANITE, vocab_size=VOCAB)


PARTS = [[3 + token % 9 for token in ids] for ids in prompts_of([3, 5, 4, 9], seed=21)]
REPEATING = [PARTS[0][:1], PARTS[0] * 3, PARTS[1] * 2 + PARTS[2] + PARTS[1][:3], PARTS[3] * 4]


def check_all(
    engine: TinyEngine, where: Path, prompts: list[list[int]], num_tokens: int = 12
) -> None:
    """All prompts, greedy and seeded, together, give the plain engine's tokens."""
    expected = {}
    for index, prompt in enumerate(prompts):
        for make in KINDS.values():
            name = engine.add(prompt, make(num_tokens), seed=index)
            expected[name] = plain.plain_tokens(prompt, make(num_tokens), seed=index, folder=where)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == tokens, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [256, 100, 37])
def test_prompts_of_several_chunks_of_the_scan(limit, backend):
    """Longer than the runs that the scan turns into products."""
    prompts = prompts_of([200, 65, 64], seed=9)
    engine = TinyEngine(
        folder(),
        max_model_len=256,
        num_blocks=200,
        max_num_batched_tokens=256,
        long_prefill_token_threshold=limit,
        **BACKENDS[backend],
    )
    assert_greedy(folder(), prompts, engine.generate(prompts, greedy(6)), 6)


@pytest.mark.parametrize(("device", "depth"), [("queued", 2), ("fake", 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_at_every_step(kind, device, depth):
    """The row that it comes back to may have another's state."""
    first, second = prompts_of([9, 12], seed=5)
    expected = [
        plain.plain_tokens(prompt, KINDS[kind](9), seed=5, folder=folder())
        for prompt in (first, second)
    ]
    for k in range(1, 14):
        engine = TinyEngine(
            folder(), device=device, max_steps_in_flight=depth, long_prefill_token_threshold=3
        )
        names = [engine.add(prompt, KINDS[kind](9), seed=5) for prompt in (first, second)]
        for _ in range(k):
            engine.step()
        engine.loop.scheduler.preempt(names[1])
        outcomes = engine.run()
        assert [outcomes[name].token_ids for name in names] == expected, k


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("choose", PADDINGS)
def test_padded_sizes(choose, device, backend):
    engine = TinyEngine(folder(), device=device, choose=choose, **BACKENDS[backend])
    check_all(engine, folder(), prompts_of([1, 8, 21, 37], seed=11))


def test_bfloat16_is_near_float32():
    """The state itself is float32, so errors do not pile up over tokens."""
    where = tiny_model("GraniteMoeHybrid", **GRANITE, initializer_range=0.1)
    (ids,) = prompts_of([100])
    expected = oracle_logits(where, ids)
    logits = engine_logits(TinyEngine(where, dtype="bfloat16", max_num_batched_tokens=128), ids)
    error = (logits.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.05


# Drafts.


def speculating(num_drafts: int, method: str = "ngram", **changes: Any) -> TinyEngine:
    known = NGRAM if method == "ngram" else {"method": method}
    speculation = SpeculationConfig(**known, num_speculative_tokens=num_drafts)
    return TinyEngine(few_tokens(), speculation=speculation, **changes)


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
def test_ngram_drafts(device, depth, num_drafts):
    engine = speculating(num_drafts, device=device, max_steps_in_flight=depth)
    check_all(engine, few_tokens(), REPEATING, 16)
    stats = engine.loop.scheduler.stats
    assert stats.num_accepted_tokens > 0
    assert stats.num_accepted_tokens < stats.num_draft_tokens


class NoChance:
    """In place of a random generator, which padding rows would move on."""

    def integers(self, low: int, high: int, count: int) -> np.ndarray:
        return np.full(count, low)


class HalfRight(CountingDrafter):
    """Depends on a row's own answer alone: its first draft is right, the others mostly."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rng = NoChance()

    def _proposal(self, right: np.ndarray) -> np.ndarray:
        drafts = right.copy()
        drafts[1 + int(right[0]) % len(right) :] = 3
        return drafts


@pytest.fixture
def scripted(monkeypatch):
    """Drafters that know the answers, by name."""

    def answers_of(where: Path, num_tokens: int = 16) -> None:
        ScriptedDrafter.answers = [
            prompt + plain.plain_tokens(prompt, make(num_tokens), seed=index, folder=where)
            for index, prompt in enumerate(REPEATING)
            for make in KINDS.values()
        ]

    monkeypatch.setitem(table.SPECULATORS, "scripted", "support.drafters:ScriptedDrafter")
    monkeypatch.setitem(table.SPECULATORS, "half right", "compose.test_recurrent:HalfRight")
    yield answers_of
    ScriptedDrafter.answers = []


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("fake", 3)])
@pytest.mark.parametrize("mode", ScriptedDrafter.MODES)
def test_whatever_the_drafts_are(mode, device, depth, scripted, monkeypatch):
    scripted(few_tokens())
    monkeypatch.setattr(ScriptedDrafter, "mode", mode)
    engine = speculating(3, "scripted", device=device, max_steps_in_flight=depth)
    check_all(engine, few_tokens(), REPEATING, 16)


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("choose", PADDINGS)
def test_padding_leaves_states_alone(choose, device, scripted, monkeypatch):
    """Case 7: rows that decode with drafts beside one with a single prompt token left, padded and
    not: after every step all states of real rows are the same bytes, those of idle rows too."""
    scripted(few_tokens(), 20)

    def states_of(choose: Callable[[Descriptor], Descriptor] | None) -> list[torch.Tensor]:
        engine = speculating(
            3, "half right", device=device, choose=choose, max_num_seqs=4, **INVARIANT
        )
        states = engine.worker._assembled.states
        layers = [states.tensors(index).raw for index in states.layer_indices]
        assert len(layers) == 2

        def fill() -> None:
            for raw in layers:
                raw.fill_(7)

        with torch.inference_mode():
            engine.device.launch(fill)
        found = []
        for index, prompt in enumerate(REPEATING[:2]):
            engine.add(prompt, greedy(12), seed=index)
        # 5 tokens and then the last one, while the others decode.
        for count in range(30):
            if count == 3:
                engine.add([4, 5, 6, 7, 8, 9], seeded(4), seed=1)
                monkeypatch.setattr(engine.loop.scheduler, "_long_prefill", 5)
            if not engine.loop.has_work():
                break
            engine.step()
            engine.device.synchronize()
            for raw in layers:
                host = engine.device.host_buffer(tuple(raw.shape), torch.uint8)
                engine.device.copy_to_host(host, raw)
                engine.device.synchronize()
                found.append(host[:4].clone())
        assert not engine.loop.has_work()
        stats = engine.loop.scheduler.stats
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        return found

    plain_states, padded = states_of(None), states_of(choose)
    assert len(plain_states) == len(padded) > 10
    for expected, actual in zip(plain_states, padded):
        assert torch.equal(expected, actual)
    # One slot was never used.
    assert all((raw[3] == 7).all() for raw in padded)
    assert any((raw[:3] != 7).any() for raw in padded)
