"""Prompt log-probabilities are transformers', however the engine comes to read the prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.test_llm import TEXTS, ask, ids, make_llm
from engine.test_open_requests import NGRAM, Rig, plain, tokens_of
from support.batch import padded
from support.plain import greedy, plain_tokens, seeded
from support.tiny import oracle_logits, prompts_of, tiny_llama

from pelton import SamplingParams
from pelton.engine.outputs import RequestOutput
from pelton.errors import RequestError
from pelton.sampling.prompt_logprobs import PromptLogprobRows

PROMPTS = prompts_of([1, 2, 8, 9, 21, 37], seed=31)
# Of a model with few tokens, whose texts repeat themselves: n-grams are found, and some are right.
REPEATING = [[3 + token % 9 for token in ids] * 2 for ids in prompts_of([1, 2, 4, 7, 11], seed=21)]


def few_tokens() -> Path:
    return tiny_llama(vocab_size=12)


def check(output: RequestOutput, prompt: list[int], k: int, folder: Path | None = None) -> None:
    """The token itself first, then the k best, within 1e-4 of transformers' log_softmax."""
    assert output.error is None
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    expected = oracle_logits(folder or tiny_llama(), prompt).log_softmax(-1).numpy()
    for position, entry in enumerate(found[1:], 1):
        assert entry is not None
        row, token = expected[position - 1], prompt[position]
        best = np.argsort(-row)[:k].tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token, *best}
        assert list(entry)[1:] == [one for one in best if one != token]
        for one, got in entry.items():
            assert got.logprob == pytest.approx(float(row[one]), abs=1e-4)
            assert got.rank == 1 + int((row > row[one]).sum())
            assert got.decoded_token is None


def values(output: RequestOutput) -> list[Any]:
    assert output.prompt_logprobs is not None
    return [
        entry and [(token, one.logprob, one.rank) for token, one in entry.items()]
        for entry in output.prompt_logprobs
    ]


def rows_of(rig: Rig) -> PromptLogprobRows:
    rows = rig.engine.worker._assembled.runner._head._prompt_logprobs  # type: ignore[attr-defined]
    assert isinstance(rows, PromptLogprobRows)
    return rows


def check_all(rig: Rig) -> None:
    """Asking rows of several widths together with rows that do not ask; tokens are the same."""
    asked = {}
    for index, prompt in enumerate(PROMPTS):
        k = (None, 0, 3, 7)[(index + 1) % 4]
        output = rig.add(str(index), prompt, seeded(4, seed=index, prompt_logprobs=k))
        asked[index] = output, k
    rig.run()
    for index, (output, k) in asked.items():
        assert tokens_of(output) == plain(PROMPTS[index], 1, index, 4)
        if k is None:
            assert output.prompt_logprobs is None
        else:
            check(output, PROMPTS[index], k)


@pytest.mark.parametrize("chunk", [0, 1, 3, 16])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_chunks_company_and_devices(device, chunk):
    check_all(Rig(device=device, long_prefill_token_threshold=chunk))


def test_depth_three():
    check_all(Rig(device="fake", max_steps_in_flight=3, max_num_batched_tokens=11))


@pytest.mark.parametrize("num_rows", [4, 5])
def test_tiles(num_rows):
    """So few rows of logits that prompts are cut and put together."""
    rig = Rig(device="fake", max_num_batched_tokens=128)
    head = rig.engine.worker._assembled.runner._head
    head._logits = head._logits[:num_rows]  # type: ignore[attr-defined]
    check_all(rig)


def test_padded_steps():
    check_all(Rig(device="fake", choose=padded(4, 64)))


def test_bitwise_the_same_when_batch_invariant():
    found = []
    for chunk in (0, 1, 3, 16):
        rig = Rig(
            attention_backend="invariant", batch_invariant=True, long_prefill_token_threshold=chunk
        )
        output = rig.add("a", PROMPTS[5], greedy(2, prompt_logprobs=3))
        others = [rig.add(f"o{i}", PROMPTS[i], greedy(2, prompt_logprobs=1)) for i in (3, 4)]
        rig.run()
        check(output, PROMPTS[5], 3)
        found.append([values(one) for one in (output, *others)])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_preempted_at_every_step(device):
    """Also in mid-prompt, and when outputs are fed again: each position comes once."""
    prompt, params = PROMPTS[4], greedy(6, prompt_logprobs=2)
    for num_steps in range(1, 11):
        rig = Rig(device=device, long_prefill_token_threshold=4)
        output = rig.add("a", prompt, params)
        for _ in range(num_steps):
            rig.step()
        assert rig.loop.scheduler.preempt("a")
        rig.run()
        check(output, prompt, 2)
        assert tokens_of(output) == [plain_tokens(prompt, greedy(6))]
        first, second = rig.new_rows
        # What has been delivered need not be computed again.
        assert first.num_computed_tokens == 0
        assert second.num_computed_tokens <= len(second.token_ids) - 1
    assert second.num_computed_tokens >= 20


def test_preempted_at_random():
    rig = Rig(device="fake", num_blocks=24, long_prefill_token_threshold=3)
    rng = random.Random(5)
    asked = []
    for index in range(18):
        prompt = PROMPTS[index % 6]
        asked.append((rig.add(str(index), prompt, greedy(5, prompt_logprobs=index % 3)), prompt))
        for _ in range(4):
            rig.step()
            running = rig.loop.scheduler._running
            if running and rng.random() < 0.3:
                assert rig.loop.scheduler.preempt(rng.choice(running).request_id)
        if index % 5 == 4:
            rig.open.abort(str(index))
    rig.run()
    assert rig.loop.scheduler.stats.num_preemptions > 5
    for index, (output, prompt) in enumerate(asked):
        if output.outputs[0].finish_reason != "abort":
            check(output, prompt, index % 3)


def test_the_prefix_cache_is_written_and_not_read():
    rig = Rig()
    prompt = PROMPTS[4]
    hits = []
    for k in (None, 2, None):
        output = rig.add("a", prompt, greedy(2, prompt_logprobs=k))
        rig.run()
        hits.append(output.num_cached_tokens)
        if k is not None:
            check(output, prompt, k)
    assert hits == [0, 0, 20]
    rig = Rig()
    for k in (2, None):
        output = rig.add("a", prompt, greedy(2, prompt_logprobs=k))
        rig.run()
    assert output.num_cached_tokens == 20


def test_with_several_answers():
    """The prompt is scored once; the siblings hit its blocks."""
    rig = Rig(device="fake")
    output = rig.add("a", PROMPTS[4], seeded(n=3, seed=3, prompt_logprobs=1))
    rig.run()
    check(output, PROMPTS[4], 1)
    assert tokens_of(output) == plain(PROMPTS[4], 3, 3)
    assert [row.num_computed_tokens for row in rig.new_rows] == [0, 20, 20]


# Together with drafts.


def drafted(**changes: Any) -> Rig:
    return Rig(few_tokens(), speculation=NGRAM, **changes)


@pytest.mark.parametrize("chunk", [0, 1, 3])
@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
def test_with_drafts(device, depth, chunk):
    """Some rows are verified while others' prompts are scored, in the same buffers."""
    rig = drafted(
        device=device,
        max_steps_in_flight=depth,
        max_num_seqs=3,
        long_prefill_token_threshold=chunk,
    )
    asked = {}
    for index, prompt in enumerate(REPEATING * 2):
        k = (None, 0, 3, 7)[(index + 1) % 4]
        output = rig.add(str(index), prompt, seeded(10, seed=index, prompt_logprobs=k, logprobs=k))
        asked[index] = output, prompt, k
        rig.step()
    rig.run()
    assert rig.loop.scheduler.stats.num_accepted_tokens > 0
    for index, (output, prompt, k) in asked.items():
        assert tokens_of(output) == plain(prompt, 1, index, 10, few_tokens())
        if k is None:
            assert output.prompt_logprobs is None
        else:
            check(output, prompt, k, few_tokens())


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("queued", 2), ("fake", 3)])
def test_with_drafts_answers_hits_and_preemption(device, depth):
    """Case 2, with drafts and n > 1: all answers preempted after any step, some of them in the
    middle of the prompt, which is in the prefix cache already."""
    prompt, folder = REPEATING[4], few_tokens()
    num_preemptions = num_accepted = 0
    for num_steps in range(1, 15, 1 if device == "cpu" else 3):
        rig = drafted(
            device=device, max_steps_in_flight=depth, long_prefill_token_threshold=5, num_blocks=40
        )
        rig.add("before", prompt, greedy(1))
        rig.run()
        output = rig.add("a", prompt, seeded(12, n=3, seed=3, prompt_logprobs=2))
        for _ in range(num_steps):
            rig.step()
        for name in ("a", "a#1", "a#2"):
            rig.loop.scheduler.preempt(name)
        rig.run()
        check(output, prompt, 2, folder)
        assert tokens_of(output) == plain(prompt, 3, 3, folder=folder)
        num_preemptions += rig.loop.scheduler.stats.num_preemptions
        num_accepted += rig.loop.scheduler.stats.num_accepted_tokens
    assert num_preemptions > 5
    assert num_accepted > 0


def test_with_drafts_bit_for_bit():
    """Case 17, with drafts and n > 1: of the prompt and of the answers, the values without drafts;
    n distinct ones, sorted, and the token itself."""
    invariant = {"attention_backend": "invariant", "batch_invariant": True}
    for k in (0, 1, 5):
        found = []
        for changes in ({}, {"speculation": NGRAM}, {"speculation": NGRAM, "device": "fake"}):
            rig = Rig(few_tokens(), **invariant, **changes)
            params = SamplingParams(
                temperature=2.0,
                max_tokens=12,
                ignore_eos=True,
                n=2,
                seed=3,
                prompt_logprobs=k,
                logprobs=k,
            )
            others = [rig.add(f"o{i}", REPEATING[i], greedy(9)) for i in (2, 3)]
            output = rig.add("a", REPEATING[4], params)
            rig.run()
            assert all(tokens_of(other) for other in others)
            answers = [
                [[(token, one.logprob, one.rank) for token, one in row.items()] for row in rows]
                for answer in output.outputs
                for rows in [answer.logprobs]
            ]
            found.append((values(output), answers))
        assert found[0] == found[1] == found[2]
        for answer, rows in zip(output.outputs, found[0][1]):
            for token, row in zip(answer.token_ids, rows, strict=True):
                assert row[0][0] == token
                assert len(row) in (k, k + 1)
                top = sorted((one for one in row if one[2] <= k), key=lambda one: one[2])
                assert [value for _, value, _ in top] == sorted(
                    (v for _, v, _ in top), reverse=True
                )


def test_host_memory_is_there_while_someone_asks():
    rig = Rig(device="fake", max_num_batched_tokens=8)
    rows = rows_of(rig)
    rig.add("a", PROMPTS[4], greedy(8))
    for _ in range(4):
        rig.step()
    assert not rows._free
    rig.add("b", PROMPTS[5], greedy(4, prompt_logprobs=2))
    for _ in range(6):
        rig.step()
    assert 1 <= len(rows._free) <= 3
    rig.run()
    rig.add("c", PROMPTS[3], greedy(4))
    rig.run()
    assert not rows._free
    assert rows._num_asking == 0


def test_limits():
    for wrong in (-1, -5):
        with pytest.raises(RequestError, match=f"between 0 and .*max_logprobs, got {wrong}"):
            SamplingParams(prompt_logprobs=wrong)
    for odd in (True, 1.0, "2"):
        with pytest.raises(RequestError, match="prompt_logprobs must be an integer"):
            SamplingParams(prompt_logprobs=odd)  # type: ignore[arg-type]
    llm = make_llm(max_logprobs=4)
    for field in ("logprobs", "prompt_logprobs"):
        text = rf"{field} must be at most 4 \(max_logprobs\), got 5"
        with pytest.raises(RequestError, match=text) as caught:
            ask(llm, TEXTS[0], greedy(2, **{field: 5}))
        assert caught.value.field == field
    (output,) = ask(llm, TEXTS[0], greedy(2, prompt_logprobs=4))
    tokens = ids(TEXTS[0])
    assert len(output.prompt_logprobs) == len(tokens)
    for token, entry in zip(tokens[1:], output.prompt_logprobs[1:]):
        assert entry[token].decoded_token == llm.get_tokenizer().token_text(token)


def test_the_runner_refuses_too_many_for_that_row_alone():
    rig = Rig(max_logprobs=2)
    wrong = rig.add("a", PROMPTS[3], greedy(3, prompt_logprobs=3))
    good = rig.add("b", PROMPTS[3], greedy(3, prompt_logprobs=2))
    rig.run()
    assert isinstance(wrong.error, RequestError)
    check(good, PROMPTS[3], 2)
