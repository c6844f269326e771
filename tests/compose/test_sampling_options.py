"""Penalties, biases, allowed tokens, bad words and processors do not depend on how a request runs.

All in one go: every row of a step asks for something else, and neighbours ask for nothing.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from support.drafters import ScriptedDrafter
from support.plain import greedy, plain_tokens, seeded
from support.sampling import edited
from support.tiny import VOCAB, TinyEngine, oracle_logits, prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.config.speculation import SpeculationConfig
from pelton.core.request import Request
from pelton.errors import RequestError, RequestFailed
from pelton.sampling import table
from pelton.sampling.rows import SamplingRows
from pelton.speculation.table import SPECULATORS

PROMPTS = prompts_of((3, 8, 13, 21), seed=4)
FEW = list(range(0, VOCAB, 9))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": 0.6},
    "reward": {"repetition_penalty": 0.5, "frequency_penalty": -1.5},
    "bias": {"logit_bias": {n: (n % 7) * 3.0 - 9 for n in range(0, VOCAB, 2)}, "min_tokens": 5},
    "allowed": {"allowed_token_ids": FEW, "frequency_penalty": 1.5},
    "processor": {"logits_processors": {"ban_seen": {"outputs_only": False}}},
}
NUM_TOKENS = 14
NGRAM = SpeculationConfig(
    method="ngram", prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=3
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name in ("ban_seen", "fail"):
        monkeypatch.setitem(table.PROCESSORS, name, f"support.processors:{name}")


def kinds() -> list[tuple[str, SamplingParams]]:
    found = []
    for name, options in {**OPTIONS, "bad words": {"bad_words_token_ids": bad_words()}}.items():
        found.append((name, greedy(NUM_TOKENS, **options)))
        found.append((name, seeded(NUM_TOKENS, **options)))
    return found


@functools.cache
def bad_words() -> tuple[tuple[int, ...], ...]:
    """Made of the greedy answers without: pairs and triples that would come, and one token."""
    words = []
    for prompt in PROMPTS:
        tokens = plain_tokens(prompt, greedy(NUM_TOKENS))
        words += [tuple(tokens[2:4]), tuple(tokens[5:8]), (tokens[0],)]
    return tuple(words)


def add_all(engine: TinyEngine) -> dict[str, list[int]]:
    expected = {}
    for index, (_, params) in enumerate(kinds()):
        prompt = PROMPTS[index % len(PROMPTS)]
        expected[engine.add(prompt, params, seed=index)] = plain_tokens(prompt, params, seed=index)
    return expected


def check(engine: TinyEngine, expected: dict[str, list[int]]) -> None:
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert outcomes[name].error is None
        assert outcomes[name].token_ids == tokens, name


def test_greedy_tokens_equal_an_oracle_on_transformers_logits():
    """What the plain engine gives is right: so the tests below compare with the truth."""
    for name, params in kinds():
        if params.temperature:
            continue
        for prompt in PROMPTS[:2]:
            ids = list(prompt)
            for _ in range(NUM_TOKENS):
                x = edited(oracle_logits(tiny_llama(), ids)[-1], ids, len(prompt), params)
                best, second = np.sort(x)[[-1, -2]]
                assert best - second > 1e-4, "the fixture has a near tie"
                ids.append(int(x.argmax()))
            assert plain_tokens(prompt, params) == ids[len(prompt) :], name


def test_every_option_matters():
    """Otherwise equal tokens would prove nothing."""
    plain = plain_tokens(PROMPTS[2], greedy(NUM_TOKENS))
    for name, params in kinds():
        if name != "plain" and not params.temperature:
            assert plain_tokens(PROMPTS[2], params) != plain, name


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_batched_on_every_device_at_every_depth(device, depth):
    engine = TinyEngine(tiny_llama(), device=device, max_steps_in_flight=depth)
    check(engine, add_all(engine))


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("device", ["queued", "fake"])
def test_chunk_sizes(device, chunk):
    engine = TinyEngine(tiny_llama(), device=device, long_prefill_token_threshold=chunk)
    check(engine, add_all(engine))


def test_prefix_hits():
    """A cached prompt counts as prompt all the same."""
    engine = TinyEngine(tiny_llama(), num_blocks=200)
    for _ in range(2):
        check(engine, add_all(engine))


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_preempted_again_and_again(device, every):
    """A resumed request's outputs still count as outputs, and its prompt as prompt."""
    engine = TinyEngine(tiny_llama(), device=device, long_prefill_token_threshold=4)
    expected = add_all(engine)
    for count in range(600):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % (every * 3) == every:
            for name in expected:
                engine.loop.scheduler.preempt(name)
    check(engine, expected)
    assert sum(engine.outcomes[name].request.num_preemptions for name in expected) > 9


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_a_pool_that_forces_preemption(device):
    engine = TinyEngine(tiny_llama(), device=device, num_blocks=16)
    expected = add_all(engine)
    check(engine, expected)
    assert engine.loop.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
def test_with_drafts(device, depth):
    """A verification row counts the drafts before it, and rejected ones count for nothing: tokens
    of the plain engine, with n-grams that are found because an option makes texts repeat."""
    engine = TinyEngine(
        tiny_llama(),
        device=device,
        max_steps_in_flight=depth,
        speculation=NGRAM,
    )
    expected = add_all(engine)
    check(engine, expected)
    stats = engine.loop.scheduler.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
def test_with_drafts_preempted_again_and_again(device, depth):
    """Case 2, with drafts, biases, allowed tokens and bad words."""
    engine = TinyEngine(
        tiny_llama(),
        device=device,
        max_steps_in_flight=depth,
        long_prefill_token_threshold=4,
        speculation=NGRAM,
    )
    expected = add_all(engine)
    for count in range(600):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 7 == 3:
            for name in expected:
                engine.loop.scheduler.preempt(name)
    check(engine, expected)
    assert sum(engine.outcomes[name].request.num_preemptions for name in expected) > 9
    assert engine.loop.scheduler.stats.num_accepted_tokens > 0


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("fake", 3)])
@pytest.mark.parametrize("mode", ["random", "outside"])
def test_drafts_bring_no_illegal_token(monkeypatch, mode, device, depth):
    """Case 20: drafts that a row's own lists forbid, or that no vocabulary has."""
    monkeypatch.setitem(SPECULATORS, "scripted", "support.drafters:ScriptedDrafter")
    monkeypatch.setattr(ScriptedDrafter, "mode", mode)
    engine = TinyEngine(
        tiny_llama(),
        device=device,
        max_steps_in_flight=depth,
        speculation=SpeculationConfig(method="scripted", num_speculative_tokens=3),
    )
    expected = add_all(engine)
    # One legal token, which no draft is.
    single = engine.add(PROMPTS[1], seeded(NUM_TOKENS, allowed_token_ids=[VOCAB - 1]))
    check(engine, expected)
    assert engine.outcomes[single].token_ids == [VOCAB - 1] * NUM_TOKENS
    for name in expected:
        allowed = engine.outcomes[name].request.params.allowed_token_ids or range(VOCAB)
        assert set(engine.outcomes[name].token_ids) <= set(allowed)
    assert engine.loop.scheduler.stats.num_draft_tokens > 0


def test_nothing_is_left_when_all_have_ended():
    engine = TinyEngine(tiny_llama(), device="fake")
    lists = sampling_lists(engine)
    sizes = []
    for _ in range(3):
        check(engine, add_all(engine))
        engine.add(PROMPTS[0], greedy(1))  # its plan tells of the last rows that ended
        engine.run()
        assert lists._owned == {}
        sizes.append(len(lists.pool.tensor))
    assert len(set(sizes)) == 1


def sampling_lists(engine: TinyEngine) -> Any:
    hooks = engine.worker._assembled.runner._add_hooks
    (rows,) = [h.__self__ for h in hooks if isinstance(h.__self__, SamplingRows)]
    return rows.lists


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {VOCAB: 5}}, "logit_bias"),
        ({"allowed_token_ids": [5, VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words_token_ids": ((3, VOCAB),)}, "bad_words"),
    ],
)
def test_ids_outside_the_vocabulary(options, field):
    """Case 26: refused before they are queued, with the limit; a normal request works."""
    engine = TinyEngine(tiny_llama())
    with pytest.raises(RequestError, match=f"from 0 to {VOCAB - 1}") as caught:
        engine.add(PROMPTS[0], greedy(**options))
    assert caught.value.field == field
    assert engine.generate([PROMPTS[0]], greedy()) == [plain_tokens(PROMPTS[0], greedy())]


def test_bad_words_without_a_tokenizer_are_not_ignored():
    engine = TinyEngine(tiny_llama())
    name = engine.add(PROMPTS[0], greedy(bad_words=["x"]))
    outcome = engine.run()[name]
    assert outcome.finish_reason == "error"
    assert isinstance(outcome.error, RequestError)


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"allowed_token_ids": [7], "bad_words_token_ids": ((7, 7),)},
            "no token is legal as token 2 of the answer: allowed_token_ids and bad_words",
        ),
        ({"logits_processors": ["fail"]}, "logits processor"),
    ],
)
def test_a_row_without_a_way_on_ends_alone(options, words, device):
    """Case 20: the error names the reason, and the neighbours go on."""
    engine = TinyEngine(tiny_llama(), device=device)
    wrong = engine.add(PROMPTS[0], greedy(**options))
    expected = add_all(engine)
    check(engine, expected)
    outcome = engine.outcomes[wrong]
    assert outcome.finish_reason == "error"
    # What a request's own fields make impossible is its fault, and named.
    fault = RequestError if "allowed_token_ids" in options else RequestFailed
    assert isinstance(outcome.error, fault)
    assert words in str(outcome.error)
    assert isinstance(outcome.request, Request)
