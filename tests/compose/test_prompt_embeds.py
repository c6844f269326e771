"""Embeddings of a model's own table are the text that they are of, however the engine runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compose.test_families import FAMILIES
from support.embeds import FORMS, NOTED, add_form, as_form, check_forms, own_rows, places_of
from support.families import tiny_model
from support.plain import KINDS, greedy, logprobs_of, plain_tokens, seeded
from support.tiny import TinyEngine, oracle, prompts_of, tiny_llama

from pelton.config.graphs import GraphsConfig
from pelton.config.speculation import SpeculationConfig
from pelton.core.descriptor import Descriptor
from pelton.core.prompt_embeds import PromptEmbeds, placeholders
from pelton.engine.prompt_embeds import as_prompt_embeds
from pelton.errors import RequestError
from pelton.forward.recorded import RecordedExecutor
from pelton.sampling.table import PROCESSORS

LENGTHS = (1, 3, 8, 12, 21, 37)
PROMPTS = prompts_of(LENGTHS, seed=11)
INVARIANT = {"attention_backend": "invariant", "batch_invariant": True}


def engine_of(device: str = "queued", **changes: Any) -> TinyEngine:
    return TinyEngine(tiny_llama(), device=device, enable_prompt_embeds=True, **changes)


def check_all(engine: TinyEngine, kinds: dict[str, Any] = KINDS) -> None:
    check_forms(engine, tiny_llama(), PROMPTS, kinds)


@pytest.mark.parametrize(
    ("device", "depth", "changes"),
    [
        ("cpu", 1, {}),
        ("queued", 2, INVARIANT),
        ("queued", 3, {}),
        ("fake", 1, INVARIANT),
        ("fake", 2, {}),
        ("fake", 3, {}),
    ],
)
def test_depths_and_devices(device, depth, changes):
    check_all(engine_of(device, max_steps_in_flight=depth, **changes))


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
def test_chunk_sizes(limit, chunk):
    check_all(engine_of("fake", **{limit: chunk}), {"seeded": seeded})


def test_padded():
    """Padding tokens are behind the live ones, and nothing is laid over them."""

    def choose(live: Descriptor) -> Descriptor:
        return replace(live, num_rows=8, num_tokens=min(live.num_tokens + 5, 64))

    check_all(engine_of("fake", choose=choose, max_num_seqs=8))


@pytest.mark.parametrize("hit", [3, 4, 5, 11, 12, 13])
@pytest.mark.parametrize("form", ["embeds", "mix"])
def test_prefix_hits(form, hit):
    """Another request has left the first `hit` places, and what was hit is not uploaded."""
    engine = engine_of("fake", **INVARIANT)
    prompt = PROMPTS[5]
    given = as_form(tiny_llama(), prompt, places_of(form, len(prompt)))
    ids, rows = given["prompt"], given["prompt_embeds"]
    count = int((ids[:hit] < 0).sum())
    engine.add(ids[:hit], greedy(1), prompt_embeds=PromptEmbeds(rows.rows[:count], "float32"))
    engine.run()
    for make in KINDS.values():
        name = engine.add(ids, make(), seed=4, prompt_embeds=rows)
        outcome = engine.run()[name]
        assert outcome.token_ids == plain_tokens(prompt, make(), seed=4)
        if make is KINDS["greedy"]:
            assert outcome.request.num_cached_tokens == hit // 4 * 4
        else:
            assert outcome.request.num_cached_tokens == 36


@pytest.mark.parametrize("length", [4, 8, 12, 11, 13])
@pytest.mark.parametrize("form", ["embeds", "mix"])
def test_same_prompt_again(form, length):
    """Case 9 of bug_reports.md: a fully cached prompt of k * block places still computes its last
    one, which is an embedding here."""
    (prompt,) = prompts_of([length], seed=length)
    engine = engine_of("fake")
    is_row = places_of(form, length)
    is_row[-1] = True
    for round_number in range(3):
        name = engine.add(params=greedy(), **as_form(tiny_llama(), prompt, is_row))
        outcome = engine.run()[name]
        assert outcome.token_ids == plain_tokens(prompt, greedy())
        if round_number:
            assert outcome.request.num_cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("form", ["embeds", "mix"])
def test_preempted_at_every_step(form, caching, depth):
    for k in range(1, 15):
        engine = engine_of(
            "fake",
            long_prefill_token_threshold=3,
            enable_prefix_caching=caching,
            max_steps_in_flight=depth,
        )
        neighbour = add_form(engine, tiny_llama(), PROMPTS[2], greedy(9), "mix")
        name = add_form(engine, tiny_llama(), PROMPTS[3], seeded(9), form, 5)
        for _ in range(k):
            engine.step()
        was_running = engine.loop.scheduler.preempt(name)
        outcomes = engine.run()
        assert outcomes[name].request.num_preemptions == int(was_running)
        assert outcomes[name].token_ids == plain_tokens(PROMPTS[3], seeded(9), seed=5), k
        assert outcomes[neighbour].token_ids == plain_tokens(PROMPTS[2], greedy(9)), k


@pytest.mark.parametrize("form", ["embeds", "mix"])
def test_preempted_to_host_memory(form):
    """What was saved is copied back, and only what was not yet computed is uploaded."""
    for k in range(1, 8):
        engine = engine_of(
            "fake", long_prefill_token_threshold=3, enable_prefix_caching=False, num_host_pages=40
        )
        name = add_form(engine, tiny_llama(), PROMPTS[4], greedy(5), form)
        for _ in range(k):
            engine.step()
        engine.loop.scheduler.preempt(name)
        assert engine.run()[name].token_ids == plain_tokens(PROMPTS[4], greedy(5)), k
        stats = engine.loop.scheduler.stats
        assert stats.num_recomputed_tokens == 0
        assert k < 3 or stats.num_restored_tokens >= 3


def test_bfloat16_and_a_table_that_the_head_shares():
    """Rows of float32 are rounded as the table was."""
    folder = tiny_llama(tie_word_embeddings=True, dtype="bfloat16")
    engine = TinyEngine(folder, enable_prompt_embeds=True, dtype="bfloat16", **INVARIANT)
    for prompt in PROMPTS:
        found = []
        for form in FORMS:
            given = as_form(folder, prompt, places_of(form, len(prompt)))
            if "prompt_embeds" in given:
                given["prompt_embeds"] = as_prompt_embeds(
                    given["prompt_embeds"], None, dtype="bfloat16", hidden_size=48, max_rows=99
                )
            found.append(engine.add(params=greedy(logprobs=3), **given))
        outcomes = engine.run()
        assert all(outcomes[name].error is None for name in found)
        assert len({tuple(logprobs_of(engine, name)) for name in found}) == 1


def test_aborted_in_mid_prefill_leaves_nothing():
    """Case 12 of bug_reports.md."""
    engine = engine_of("fake", long_prefill_token_threshold=3, max_steps_in_flight=3)
    for k in range(1, 10):
        name = add_form(engine, tiny_llama(), PROMPTS[4], greedy(), "embeds")
        for _ in range(k):
            engine.step()
        engine.loop.abort(name)
        other = add_form(engine, tiny_llama(), PROMPTS[4], greedy(), "embeds")
        assert engine.run()[other].token_ids == plain_tokens(PROMPTS[4], greedy())


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_a_row_changes_hands(device):
    """From embeddings to text while other embeddings are computed, and back."""
    engine = engine_of(device, max_num_seqs=2, long_prefill_token_threshold=4)
    expected = {}
    forms = ("embeds", "mix", "text", "text", "embeds", "text", "mix", "mix", "text")
    for index, form in enumerate(forms):
        prompt = PROMPTS[2 + index % 4]
        name = add_form(engine, tiny_llama(), prompt, greedy(3 + index % 4), form)
        expected[name] = plain_tokens(prompt, greedy(3 + index % 4))
    outcomes = engine.run()
    assert {name: outcomes[name].token_ids for name in expected} == expected


def test_bits_are_those_of_the_text():
    """Alone, in a batch of all forms, and in chunks, with batch_invariant."""
    found = set()
    for chunk in (0, 3):
        engine = engine_of(long_prefill_token_threshold=chunk, max_num_seqs=6, **INVARIANT)
        names = [
            add_form(engine, tiny_llama(), prompt, greedy(logprobs=3), form)
            for prompt in PROMPTS
            for form in FORMS
        ]
        engine.run()
        found |= {(i // 3, tuple(logprobs_of(engine, name))) for i, name in enumerate(names)}
    for i, prompt in enumerate(PROMPTS):
        engine = engine_of(**INVARIANT)
        name = add_form(engine, tiny_llama(), prompt, greedy(logprobs=3), "embeds")
        engine.run()
        found.add((i, tuple(logprobs_of(engine, name))))
    assert len(found) == len(PROMPTS), "one result for each prompt"


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_decodes_are_replayed_and_steps_with_embeddings_are_not(device):
    graphs = GraphsConfig(decode_sizes=(1, 2, 4), token_sizes=(16, 64))
    engine = engine_of(device, long_prefill_token_threshold=8, graphs=graphs)
    executor = engine.worker._assembled.runner._executor
    assert isinstance(executor, RecordedExecutor)
    before = executor.num_replayed
    # The last of three chunks of the mix has token ids alone.
    is_row = np.arange(21) < 15
    name = engine.add(params=greedy(), **as_form(tiny_llama(), PROMPTS[4], is_row))
    assert engine.run()[name].token_ids == plain_tokens(PROMPTS[4], greedy())
    assert executor.num_replayed - before == 12
    check_all(engine)


BIAS = {0: 7.0, 1: 7.0}
"""What a placeholder is embedded as is likely, so that counting it would show."""


def other_rows(ids: list[int]) -> np.ndarray:
    """Nobody's embeddings."""
    return (own_rows(tiny_llama(), ids)[:, ::-1] * 0.7).copy()


@torch.no_grad()
def oracle_tokens(
    rows: np.ndarray, num_tokens: int, penalty: float = 1.0, prompt: list[int] | None = None
) -> list[int]:
    """Greedy tokens of transformers after inputs_embeds, with BIAS; the penalty is on outputs and
    on `prompt`, the token ids that the prompt has."""
    model = oracle(tiny_llama())
    tokens: list[int] = []
    for _ in range(num_tokens):
        after = own_rows(tiny_llama(), tokens) if tokens else rows[:0]
        embeds = torch.from_numpy(np.concatenate([rows, after]))[None]
        logits = model(inputs_embeds=embeds).logits[0, -1]
        for token, bias in BIAS.items():
            logits[token] += bias
        seen = sorted({*tokens, *(prompt or ())})
        picked = logits[seen]
        logits[seen] = torch.where(picked > 0, picked / penalty, picked * penalty)
        top = logits.topk(2)
        assert top.values[0] - top.values[1] > 1e-4, "the fixture has a near tie"
        tokens.append(int(top.indices[0]))
    return tokens


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_embeddings_of_nobodys_are_those_of_transformers(penalty):
    """No placeholder counts as a token, and in a mix the token ids do."""
    rows = other_rows(PROMPTS[3])
    engine = engine_of()
    params = greedy(repetition_penalty=penalty, logit_bias=BIAS)
    everywhere = np.ones(12, np.bool_)
    name = engine.add(placeholders(everywhere), params, prompt_embeds=PromptEmbeds(rows, "float32"))
    expected = oracle_tokens(rows, 12, penalty)
    assert engine.run()[name].token_ids == expected
    assert 0 in expected
    if penalty > 1:
        assert expected != oracle_tokens(rows, 12, penalty, [0])

    is_row = places_of("mix", 12)
    tokens = np.array(PROMPTS[3])[~is_row].tolist()
    mixed = np.where(is_row[:, None], rows, own_rows(tiny_llama(), PROMPTS[3]))
    name = engine.add(
        np.where(is_row, placeholders(is_row), PROMPTS[3]),
        params,
        prompt_embeds=PromptEmbeds(rows[is_row], "float32"),
    )
    assert engine.run()[name].token_ids == oracle_tokens(mixed, 12, penalty, tokens)


def test_masks_over_equal_rows_never_share():
    """The public bug: B alone and B after A, where A has the same rows and ids but another mask."""
    ids, rows = PROMPTS[4], other_rows(PROMPTS[4])
    masks = [np.arange(21) % 2 == 0, np.arange(21) % 2 == 1, np.ones(21, np.bool_)]

    def add(engine: TinyEngine, is_row: np.ndarray) -> str:
        return engine.add(
            np.where(is_row, placeholders(is_row), ids),
            greedy(),
            prompt_embeds=PromptEmbeds(rows[is_row], "float32"),
        )

    alone = []
    for mask in masks:
        engine = engine_of()
        name = add(engine, mask)
        alone.append(engine.run()[name].token_ids)
    assert len(set(map(tuple, alone))) == 3
    engine = engine_of()
    for is_again in (False, True):
        for mask, expected in zip(masks, alone):
            name = add(engine, mask)
            outcome = engine.run()[name]
            assert outcome.token_ids == expected
            assert outcome.request.num_cached_tokens == (20 if is_again else 0)


def test_ngram_drafts_pass_placeholders_by():
    """A text that repeats itself around embeddings: drafts come from its tokens, none from what
    stands for an embedding, and the answer is that of plain decoding."""
    ngram = SpeculationConfig(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
    )
    repeating = (PROMPTS[1] * 9)[:25]
    for device in ("cpu", "queued", "fake"):
        engine = engine_of(device, speculation=ngram)
        check_forms(engine, tiny_llama(), [*PROMPTS, repeating], KINDS)
        assert engine.loop.scheduler.stats.num_draft_tokens > 0


def test_logits_processors_see_no_placeholder(monkeypatch):
    monkeypatch.setitem(PROCESSORS, "note", "support.embeds:note_tokens")
    is_row = np.array([False, True, True, False, True])
    ids = np.where(is_row, placeholders(is_row), [5, 0, 0, 8, 0])
    engine = engine_of("cpu")
    name = engine.add(
        ids,
        greedy(2, logits_processors=["note"]),
        prompt_embeds=PromptEmbeds(other_rows([1, 2, 3]), "float32"),
    )
    first, _ = engine.run()[name].token_ids
    assert NOTED[-2:] == [[5, -1, -1, 8, -1], [5, -1, -1, 8, -1, first]]


def test_refused_for_one_request_alone():
    engine = engine_of()
    given = as_form(tiny_llama(), PROMPTS[2], places_of("mix", 8))
    with pytest.raises(RequestError, match=r"prompt_logprobs.*5 places.*embeddings"):
        engine.add(params=greedy(prompt_logprobs=1), **given)
    ids, embeds = given["prompt"], given["prompt_embeds"]
    for wrong in (-ids, np.where(ids == -2, -3, ids), ids[:4], np.where(ids > 0, -9, ids)):
        with pytest.raises(RequestError, match=r"one placeholder for each|0 to 999"):
            engine.add(wrong, greedy(), prompt_embeds=embeds)
    with pytest.raises(RequestError, match=r"0 to 999, got -1"):
        engine.add(ids, greedy())
    # What the front end has no part in: the worker refuses, and the neighbour goes on.
    off = TinyEngine(tiny_llama())
    bad = off.add(params=greedy(), **given)
    good = off.add(PROMPTS[3], greedy())
    outcomes = off.run()
    assert "enable_prompt_embeds=True" in str(outcomes[bad].error)
    assert outcomes[good].token_ids == plain_tokens(PROMPTS[3], greedy())
    narrow = engine.add(ids, greedy(), prompt_embeds=PromptEmbeds(embeds.rows[:, :7], "float32"))
    assert "48 columns of float32, got 7" in str(engine.run()[narrow].error)


# Where a factor stands on token embeddings, before or after those that are given, and recurrence.
@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("Gemma3ForCausalLM", {}),
        ("GraniteForCausalLM", {"embedding_multiplier": 3.0}),
        ("GraniteMoeHybridForCausalLM", {"embedding_multiplier": 3.0}),
        ("GptOssForCausalLM", {}),
    ],
)
def test_families(name, factor):
    family, values = FAMILIES[name]
    folder = tiny_model(family, **{**values, **factor})
    for chunk in (0, 3):
        engine = TinyEngine(
            folder,
            device="fake",
            enable_prompt_embeds=True,
            long_prefill_token_threshold=chunk,
            num_blocks=200,
            **INVARIANT,
        )
        check_forms(engine, folder, PROMPTS[3:5], KINDS)
