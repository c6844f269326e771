"""Speculation changes no token: the invariance list with n-gram on, and with drafters that are as
right, as wrong or as broken as can be. Everything is compared with the plain engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compose.test_invariance import to_largest, to_longer, to_next_power
from support import plain
from support.drafters import VOCAB, ScriptedDrafter
from support.logits import hook_logits
from support.plain import KINDS, greedy, logprobs_of, seeded
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.config.speculation import SpeculationConfig
from pelton.core.plan import StepPlan
from pelton.speculation import table

# Of a model with few tokens, whose texts repeat themselves: n-grams are found, and some are right.
PARTS = [[3 + token % 9 for token in ids] for ids in prompts_of([3, 5, 4, 9], seed=21)]
PROMPTS = [
    PARTS[0][:1],
    PARTS[0] * 3,
    PARTS[1] * 2 + PARTS[2] + PARTS[1][:3],
    PARTS[3] * 4 + PARTS[0],
]
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
INVARIANT = {"attention_backend": "invariant", "batch_invariant": True}
RUNS = [("cpu", 1), ("queued", 1), ("queued", 2), ("queued", 3), ("fake", 2), ("fake", 3)]


def few_tokens() -> Path:
    return tiny_llama(vocab_size=VOCAB)


def plain_tokens(prompt: list[int], params: SamplingParams, *, seed: int = 7) -> list[int]:
    return plain.plain_tokens(prompt, params, seed=seed, folder=few_tokens())


def engine_with(
    num_drafts: int = 3, method: str = "ngram", folder: Path | None = None, **changes: Any
) -> TinyEngine:
    known = NGRAM if method == "ngram" else {"method": method}
    speculation = SpeculationConfig(**known, num_speculative_tokens=num_drafts)
    return TinyEngine(folder or few_tokens(), speculation=speculation, **changes)


def record(engine: TinyEngine) -> list[StepPlan]:
    plans: list[StepPlan] = []
    execute = engine.worker.execute

    def recorded(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    engine.worker.execute = recorded  # type: ignore[method-assign]
    return plans


def check_all(engine: TinyEngine, num_tokens: int = 16) -> None:
    """All prompts, greedy and seeded, together, give the plain engine's tokens."""
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        for make in KINDS.values():
            name = engine.add(prompt, make(num_tokens), seed=index)
            expected[name] = plain_tokens(prompt, make(num_tokens), seed=index)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == tokens, name
        assert outcomes[name].finish_reason == "length"


# The invariance list, with n-gram on.


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
@pytest.mark.parametrize(("device", "depth"), RUNS)
def test_depths_devices_and_numbers_of_drafts(device, depth, num_drafts):
    engine = engine_with(num_drafts, device=device, max_steps_in_flight=depth)
    check_all(engine)
    assert engine.loop.scheduler.stats.num_accepted_tokens > 0


def test_with_batch_invariance():
    engine = engine_with(device="queued", **INVARIANT)
    check_all(engine)
    assert engine.loop.scheduler.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind):
    engine = engine_with(device="queued")
    for index, prompt in enumerate(PROMPTS):
        name = engine.add(prompt, KINDS[kind](), seed=index)
        expected = plain_tokens(prompt, KINDS[kind](), seed=index)
        assert engine.run()[name].token_ids == expected


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_among_sixteen_others(device):
    engine = engine_with(device=device, max_num_seqs=17, num_blocks=300)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 20, 25, 31, 32, 40]
    others = [[3 + token % 9 for token in ids] for ids in prompts_of(lengths, seed=2)]
    expected = {}
    for index, prompt in enumerate([*others[:8], PROMPTS[2], *others[8:]]):
        params = (greedy if index % 2 else seeded)(5 + index % 8)
        name = engine.add(prompt, params, seed=index)
        expected[name] = plain_tokens(prompt, params, seed=index)
        if index % 3 == 0:
            engine.step()
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_chunk_sizes(limit, chunk):
    check_all(engine_with(device="queued", **{limit: chunk}))


@pytest.mark.parametrize("hit", [3, 4, 5, 19, 20, 21])
def test_prefix_hits(hit):
    engine = engine_with(device="queued")
    prompt = PROMPTS[3]
    for kind, make in KINDS.items():
        assert engine.loop.scheduler.reset_prefix_cache()
        engine.add(prompt[:hit], greedy(1))
        engine.run()
        name = engine.add(prompt, make(), seed=4)
        outcome = engine.run()[name]
        assert outcome.request.num_cached_tokens == hit // 4 * 4
        assert outcome.token_ids == plain_tokens(prompt, make(), seed=4), kind


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_preempted_at_every_step(num_drafts, device, depth):
    """Case 2, with drafts: results of the old life are dropped, and the drafts with them."""
    method = "scripted"
    ScriptedDrafter.mode = "some"
    for make in KINDS.values():
        tokens = plain_tokens(PROMPTS[3], make(9), seed=5)
        ScriptedDrafter.answers = [PROMPTS[3] + tokens]
        for k in range(1, 12):
            engine = engine_with(
                num_drafts,
                method,
                device=device,
                max_steps_in_flight=depth,
                long_prefill_token_threshold=16,
            )
            neighbour = engine.add(PROMPTS[1], greedy(9))
            name = engine.add(PROMPTS[3], make(9), seed=5)
            for _ in range(k):
                engine.step()
            was_running = engine.loop.scheduler.preempt(name)
            outcomes = engine.run()
            assert outcomes[name].request.num_preemptions == int(was_running)
            assert outcomes[name].token_ids == tokens, k
            assert outcomes[neighbour].token_ids == plain_tokens(PROMPTS[1], greedy(9)), k


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_a_pool_that_forces_preemption(device):
    engine = engine_with(device=device, num_blocks=18, long_prefill_token_threshold=5)
    check_all(engine)
    assert engine.loop.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("choose", [to_largest, to_next_power, to_longer])
def test_padded_sizes(choose, device):
    """Case 7."""
    check_all(engine_with(device=device, choose=choose))


# Drafters that nobody would ship.


@pytest.fixture(autouse=True)
def _drafters(monkeypatch):
    monkeypatch.setattr(table, "SPECULATORS", dict(table.SPECULATORS))
    monkeypatch.setattr("pelton.speculation.drafting.SPECULATORS", table.SPECULATORS)
    table.register("scripted", "support.drafters:ScriptedDrafter")
    table.register("counting", "support.drafters:CountingDrafter")
    yield
    ScriptedDrafter.answers = []


def script(mode: str, num_tokens: int = 16) -> None:
    ScriptedDrafter.mode = mode
    ScriptedDrafter.answers = [
        prompt + plain_tokens(prompt, make(num_tokens), seed=index)
        for index, prompt in enumerate(PROMPTS)
        for make in KINDS.values()
    ]


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
@pytest.mark.parametrize("method", ["scripted", "counting"])
@pytest.mark.parametrize("mode", ScriptedDrafter.MODES)
def test_whatever_the_drafts_are(mode, method, device, depth):
    script(mode)
    engine = engine_with(3, method, device=device, max_steps_in_flight=depth)
    check_all(engine)
    stats = engine.loop.scheduler.stats
    share = stats.num_accepted_tokens / max(stats.num_draft_tokens, 1)
    # A start that two answers have in common, and what lies behind an answer, may surprise.
    low, high = {"right": (0.6, 1), "wrong": (0, 0.2), "random": (0, 0.3), "some": (0.2, 0.9)}.get(
        mode, (0, 0)
    )
    assert low <= share <= high


def test_right_drafts_save_steps():
    script("right")
    engine = engine_with(3, "counting", max_num_seqs=1)
    name = engine.add(PROMPTS[1], greedy(16), seed=1)
    assert engine.run()[name].token_ids == plain_tokens(PROMPTS[1], greedy(16), seed=1)
    # The first token, then 4 a step.
    assert engine.loop.scheduler.stats.num_steps == 1 + 4


@pytest.mark.parametrize("method", ["ngram", "counting"])
def test_no_match_costs_no_verification(method):
    """Every plan is the plain engine's."""
    script("none")
    prompts = prompts_of([7, 12], seed=51)

    def plans_of(engine: TinyEngine) -> list[Any]:
        plans = record(engine)
        for prompt in prompts:
            engine.add(prompt, seeded(5), seed=1)
        engine.run()
        return [(p.num_scheduled_tokens.tolist(), p.bounds_are_exact) for p in plans]

    # A model with many tokens, which does not repeat one so soon.
    folder = tiny_llama()
    for prompt in prompts:
        known = prompt + plain.plain_tokens(prompt, seeded(5), seed=1, folder=folder)
        assert len(set(known)) == len(known), "the fixture repeats a token"
    assert plans_of(engine_with(3, method, folder)) == plans_of(TinyEngine(folder))


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
@pytest.mark.parametrize("mode", ["right", "some", "outside"])
def test_the_end_of_the_context(mode, device, depth):
    """Case 6: a block of drafts that would pass max_model_len."""
    prompt = PROMPTS[3]
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    tokens = plain_tokens(prompt, greedy(20))
    for num_tokens in (1, 2, 3, 4, 5, 20):
        ScriptedDrafter.mode = mode
        ScriptedDrafter.answers = [prompt + tokens]
        engine = engine_with(
            4,
            "scripted",
            device=device,
            max_steps_in_flight=depth,
            max_model_len=len(prompt) + num_tokens,
        )
        outcome = engine.outcomes[engine.add(prompt, params)]
        engine.run()
        assert outcome.token_ids == tokens[:num_tokens]
        assert outcome.finish_reason == "length"


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
def test_ends_inside_a_block(device, depth):
    """A stop token, an end token, and max_tokens at every place of a block of right drafts; what is
    behind is dropped."""
    prompt = PROMPTS[2]
    tokens = plain_tokens(prompt, greedy(12))
    ScriptedDrafter.mode = "right"
    ScriptedDrafter.answers = [prompt + tokens]
    engine = engine_with(3, "scripted", device=device, max_steps_in_flight=depth)
    for at in range(1, 10):
        stopped = engine.add(prompt, greedy(12, stop_token_ids=[tokens[at]]))
        cut = engine.add(prompt, greedy(at))
        outcomes = engine.run()
        first = tokens.index(tokens[at])
        assert outcomes[stopped].token_ids == tokens[: first + 1]
        assert outcomes[stopped].finish_reason == "stop"
        assert outcomes[stopped].request.stop_reason == tokens[at]
        assert outcomes[cut].token_ids == tokens[:at]


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
@pytest.mark.parametrize("mode", ["right", "some"])
def test_min_tokens(mode, device, depth):
    """The mask of end tokens goes by each verification row's own position, at every place of a
    block, with and without drafts in flight."""
    prompt = PROMPTS[2]
    free = plain_tokens(prompt, greedy(12))
    for least in range(1, 9):
        params = greedy(12, min_tokens=least, stop_token_ids=[free[3], free[5]])
        tokens = plain_tokens(prompt, params)
        ScriptedDrafter.mode = mode
        # A drafter that does not know of the mask proposes the masked tokens too.
        ScriptedDrafter.answers = [prompt + free, prompt + tokens]
        engine = engine_with(3, "scripted", device=device, max_steps_in_flight=depth)
        name = engine.add(prompt, params)
        assert engine.run()[name].token_ids == tokens, least


@pytest.mark.parametrize("mode", ["right", "some", "wrong"])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_plain_decoding(kind, mode):
    """Bit for bit, of accepted and of drawn tokens, in batch-invariant mode."""
    script(mode)
    undrafted = TinyEngine(few_tokens(), **INVARIANT)
    drafted = engine_with(3, "scripted", device="queued", **INVARIANT)
    found = []
    for engine in (undrafted, drafted):
        name = engine.add(PROMPTS[2], KINDS[kind](16, logprobs=3), seed=2)
        engine.add(PROMPTS[3], greedy(7, logprobs=1), seed=3)
        engine.run()
        found.append(logprobs_of(engine, name))
    assert len(found[0]) == 16
    assert found[0] == found[1]


def test_bad_logits_end_only_their_request():
    """Case 20: one request's row is NaN in the middle of a block of right drafts."""
    script("right")
    engine = engine_with(3, "scripted", max_num_seqs=2)
    good = engine.add(PROMPTS[1], greedy(16), seed=1)
    bad = engine.add(PROMPTS[3], greedy(16), seed=3)

    def poison(logits: Any) -> None:
        if len(logits) == 8:  # two rows of 1 + 3: the second's third
            logits[6] = float("nan")

    hook_logits(engine.worker.model, poison)
    outcomes = engine.run()
    assert outcomes[bad].finish_reason == "error"
    assert "not finite" in str(outcomes[bad].error)
    assert outcomes[good].token_ids == plain_tokens(PROMPTS[1], greedy(16), seed=1)
