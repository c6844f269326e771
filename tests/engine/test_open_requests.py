"""Several answers to one prompt: one prefill, own noise, one life, and nothing left behind."""

from __future__ import annotations

import copy
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_llm import TEXTS, ask, check_answers, expected, ids, make_llm, text_of
from support.logits import hook_logits
from support.plain import greedy, plain_tokens, seeded
from support.tiny import VOCAB, TinyEngine, prompts_of, tiny_llama

from pelton import LLM, SamplingParams
from pelton.config.params import MAX_N
from pelton.config.speculation import SpeculationConfig
from pelton.core.request import Request
from pelton.engine.open_requests import OpenRequests
from pelton.engine.outputs import RequestOutput
from pelton.errors import RequestError, RequestFailed

PROMPTS = prompts_of([1, 4, 7, 8, 9, 21], seed=5)


class Rig:
    """OpenRequests over a tiny engine without text."""

    def __init__(self, folder: Path | None = None, **changes: Any) -> None:
        self.engine = TinyEngine(folder or tiny_llama(), **changes)
        self.loop = self.engine.loop
        self.open = OpenRequests(self.loop.add, self.loop.abort, None)
        self.new_rows: list[Any] = []
        self.num_tokens = 0
        execute = self.engine.worker.execute

        def recorded(plan: Any) -> Any:
            self.new_rows += plan.new_rows
            self.num_tokens += plan.num_tokens
            return execute(plan)

        self.engine.worker.execute = recorded  # type: ignore[method-assign]

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
        return self.open.open(Request(name, prompt, params), None)

    def step(self) -> None:
        self.open.take(self.loop.step())

    def run(self) -> None:
        while self.open or self.loop.has_work():
            self.step()
        self.check_empty()

    def check_empty(self) -> None:
        while self.loop.has_work():
            self.step()
        scheduler = self.loop.scheduler
        assert len(self.open) == 0
        assert not scheduler.has_unfinished()
        assert not scheduler._by_ref
        assert len(scheduler._free_slots) == self.engine.config.scheduler.max_num_seqs
        assert scheduler.stats.kv_usage == 0
        scheduler.check_integrity()


def tokens_of(output: RequestOutput) -> list[list[int]]:
    assert output.finished
    assert output.error is None
    assert [one.index for one in output.outputs] == list(range(len(output.outputs)))
    return [one.token_ids for one in output.outputs]


def plain(
    prompt: list[int], n: int, seed: int, num_tokens: int = 12, folder: Path | None = None
) -> list[list[int]]:
    return [
        plain_tokens(prompt, seeded(num_tokens, seed=seed + i), folder=folder) for i in range(n)
    ]


@pytest.mark.parametrize("changes", [{}, {"long_prefill_token_threshold": 3}])
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_answers_are_those_of_n_requests(device, changes):
    """Answer i is that of a lone request with seed + i, and the full blocks are computed once."""
    rig = Rig(device=device, max_num_seqs=5, **changes)
    for prompt in PROMPTS:
        assert rig.loop.scheduler.reset_prefix_cache()
        rig.new_rows, rig.num_tokens = [], 0
        output = rig.add("a", prompt, seeded(n=4, seed=9))
        rig.run()
        assert tokens_of(output) == plain(prompt, 4, 9)
        assert output.num_cached_tokens == 0
        assert output.prompt_token_ids == prompt
        hit = (len(prompt) - 1) // 4 * 4
        assert [row.num_computed_tokens for row in rig.new_rows] == [0, hit, hit, hit]
        assert [row.request_id for row in rig.new_rows] == ["a", "a#1", "a#2", "a#3"]
    assert len({tuple(one) for one in plain(PROMPTS[4], 4, 9)}) == 4


def test_among_others_and_preempted():
    rig = Rig(device="fake", num_blocks=20, max_num_seqs=4)
    rng = random.Random(1)
    outputs = []
    for index, prompt in enumerate(PROMPTS):
        outputs.append(rig.add(str(index), prompt, seeded(n=1 + index % 3, seed=index)))
        for _ in range(3):
            rig.step()
            running = rig.loop.scheduler._running
            if running and rng.random() < 0.4:
                assert rig.loop.scheduler.preempt(rng.choice(running).request_id)
    rig.run()
    assert rig.loop.scheduler.stats.num_preemptions > 3
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs)):
        assert tokens_of(output) == plain(prompt, 1 + index % 3, index)


def test_without_prefix_caching_each_computes_the_prompt():
    rig = Rig(enable_prefix_caching=False)
    output = rig.add("a", PROMPTS[5], seeded(n=3, seed=2))
    rig.run()
    assert tokens_of(output) == plain(PROMPTS[5], 3, 2)
    assert [row.num_computed_tokens for row in rig.new_rows] == [0, 0, 0]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_answers_of_one_token(device):
    """Child 0 has ended before its siblings join; they hit its blocks all the same."""
    rig = Rig(device=device)
    output = rig.add("a", PROMPTS[5], seeded(1, n=3, seed=2))
    rig.run()
    assert tokens_of(output) == plain(PROMPTS[5], 3, 2, num_tokens=1)
    assert [row.num_computed_tokens for row in rig.new_rows] == [0, 20, 20]


def test_without_a_seed_every_answer_has_its_own_noise():
    rig = Rig()
    output = rig.add("a", PROMPTS[4], seeded(n=4))
    rig.run()
    assert len({tuple(tokens) for tokens in tokens_of(output)}) == 4


def test_the_largest_seed_has_siblings():
    rig = Rig()
    output = rig.add("a", PROMPTS[2], seeded(n=2, seed=2**63 - 1))
    rig.run()
    last, first = (plain_tokens(PROMPTS[2], seeded(seed=s)) for s in (2**63 - 1, -(2**63)))
    assert tokens_of(output) == [last, first]


def test_siblings_stand_where_their_request_stood():
    """Case 4: whoever came later is not served before them."""
    rig = Rig(max_num_seqs=1)
    for name, prompt in zip("abc", PROMPTS):
        rig.add(name, prompt, seeded(3, n=2, seed=1))
    rig.run()
    assert [row.request_id for row in rig.new_rows] == ["a", "a#1", "b", "b#1", "c", "c#1"]


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"n": 0}, "n", f"between 1 and {MAX_N}, got 0"),
        ({"n": MAX_N + 1}, "n", f"between 1 and {MAX_N}, got {MAX_N + 1}"),
        ({"n": 2.0}, "n", "integer, got 2.0"),
        ({"n": True}, "n", "integer, got True"),
        ({"best_of": 2}, "best_of", "best_of=2 is not supported"),
    ],
)
def test_refused_by_name(changes, field, text):
    with pytest.raises(RequestError, match=text) as caught:
        SamplingParams(**changes)
    assert caught.value.field == field


# Ends.


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_abort_after_any_step(device):
    """Case 32: by the request's own id, before, while and after its children join."""
    rig = Rig(device=device, max_num_seqs=2, long_prefill_token_threshold=8)
    for num_steps in range(0, 40, 1 if device == "cpu" else 3):
        output = rig.add("a", PROMPTS[5], seeded(8, n=3, seed=4))
        witness = rig.add("w", PROMPTS[3], seeded(8, n=2, seed=4))
        for _ in range(num_steps):
            rig.step()
        was_finished = output.finished
        assert rig.open.abort("a") is not was_finished
        assert not rig.open.abort("a")
        assert output.finished
        for one, full in zip(output.outputs, plain(PROMPTS[5], 3, 4, 8), strict=True):
            assert one.finish_reason in ("abort", "length")
            assert one.token_ids == full[: len(one.token_ids)]
            assert (one.finish_reason == "length") == (len(one.token_ids) == 8)
        rig.run()
        assert tokens_of(witness) == plain(PROMPTS[3], 2, 4, 8)
    assert was_finished


@pytest.mark.parametrize("num_steps", [1, 2, 3, 30, 40, 70])
def test_what_is_held_back_is_shown_in_the_end(num_steps):
    """Tokens are noted, and shown some at a time; an abort, an error or the end loses none."""
    rig = Rig(max_model_len=120, max_num_seqs=3)
    params = seeded(90, seed=4)
    requests = [Request(name, PROMPTS[3], params) for name in "abc"]
    outputs = [rig.open.open(request, None) for request in requests]
    full = plain(PROMPTS[3], 1, 4, 90)[0]
    for _ in range(num_steps):
        rig.step()
    (aborted,), count = outputs[0].outputs, requests[0].num_output_tokens
    assert rig.open.abort("a")
    assert (aborted.token_ids, aborted.finish_reason) == (full[:count], "abort")
    poison(rig, "b")
    rig.step()
    (failed,), count = outputs[1].outputs, requests[1].num_output_tokens
    assert (failed.token_ids, failed.finish_reason) == (full[:count], "error")
    del rig.engine.worker._assembled.runner._head._sample
    rig.run()
    assert tokens_of(outputs[2]) == [full]


NGRAM = SpeculationConfig(
    method="ngram", prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=3
)


@pytest.mark.parametrize(("device", "depth"), [("cpu", 1), ("fake", 3)])
def test_cancelled_with_drafts_and_lists(device, depth):
    """Case 32, with drafts, n > 1, biases and bad words: nothing is left in any of them."""
    rig = Rig(
        tiny_llama(vocab_size=12),
        device=device,
        num_blocks=40,
        max_steps_in_flight=depth,
        speculation=NGRAM,
    )
    options = [
        {"logit_bias": {5: 2.0, 7: -3.0}},
        {"bad_words_token_ids": ((5, 6), (7,))},
        {"allowed_token_ids": [3, 4, 5]},
        {"prompt_logprobs": 2, "logprobs": 3},
    ]
    rng = random.Random(4)
    for index in range(160):
        prompt = [3 + token % 9 for token in rng.choice(PROMPTS)] * 2
        params = seeded(12, n=rng.choice([1, 3]), seed=index, **rng.choice(options))
        rig.add(f"r{index}", prompt, params)
        for _ in range(rng.randrange(4)):
            rig.step()
        if index >= 4:
            rig.open.abort(f"r{index - rng.randrange(5)}")
    rig.open.abort_all()
    rig.check_empty()
    assert rig.loop.scheduler.stats.num_accepted_tokens > 10
    folder = tiny_llama(vocab_size=12)
    prompt = [5, 6, 7] * 3
    output = rig.add("r", prompt, seeded(n=2, seed=3))
    rig.run()
    assert tokens_of(output) == plain(prompt, 2, 3, folder=folder)
    hooks = rig.engine.worker._assembled.runner._add_hooks
    rows = {type(hook.__self__).__name__: hook.__self__ for hook in hooks}
    assert rows["SamplingRows"].lists._owned == {}
    assert rows["PromptLogprobRows"]._num_asking == 0


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {"999999": 5}},
        {"logit_bias": {"-1": 5}},
        {"allowed_token_ids": [5, VOCAB]},
        {"bad_words_token_ids": ((3, VOCAB),)},
        {"stop_token_ids": [999999], "min_tokens": 1},
    ],
)
def test_ids_outside_the_vocabulary(options):
    """Case 26, with n > 1 and drafts: refused at once, and a normal request works."""
    rig = Rig(speculation=NGRAM)
    with pytest.raises(RequestError, match=f"from 0 to {VOCAB - 1}"):
        rig.add("a", PROMPTS[3], seeded(n=3, **options))
    with pytest.raises(RequestError, match=f"from 0 to {VOCAB - 1}"):
        rig.add("a", [5, 999999], seeded(n=3))
    rig.check_empty()
    output = rig.add("a", PROMPTS[3], seeded(n=3, seed=4))
    rig.run()
    assert tokens_of(output) == plain(PROMPTS[3], 3, 4)


def test_thousand_cancelled_requests():
    """Case 32: half with n = 3, cancelled at random times, some twice."""
    rig = Rig(device="fake", num_blocks=40)
    rng = random.Random(3)
    names: list[str] = []
    for index in range(1000):
        prompt = rng.choice(PROMPTS)
        rig.add(f"r{index}", prompt, seeded(20, n=rng.choice([1, 3]), seed=index))
        names.append(f"r{index}")
        if rng.random() < 0.1:
            rig.step()
        while len(names) > 6:
            name = rng.choice(names)
            rig.open.abort(name)
            if rng.random() < 0.8:
                names.remove(name)
    rig.open.abort_all()
    rig.check_empty()
    assert rig.loop.scheduler.stats.num_generated_tokens > 100


def poison(rig: Rig, victim: str) -> None:
    """NaN logits for one child, from its first step on."""
    head = rig.engine.worker._assembled.runner._head
    sample, model = head._sample, rig.engine.worker.model
    is_hit: list[bool] = []

    def hooked(plan: Any, source: Any, batch: Any, rows: Any, packed: Any) -> None:
        slots = {row.ref: row.request_id for row in rig.new_rows}
        at = [i for i, ref in enumerate(batch.refs) if slots[ref] == victim]
        starts = batch.num_logits_np.cumsum() - batch.num_logits_np

        def change(logits: torch.Tensor) -> None:
            for i in at:
                logits[starts[i] : starts[i] + batch.num_logits_np[i]] = torch.nan
                is_hit.append(True)

        spoilt = copy.copy(model)
        hook_logits(spoilt, change)
        sample(plan, replace(source, vocabulary=spoilt), batch, rows, packed)

    head._sample = hooked
    rig.is_hit = is_hit  # type: ignore[attr-defined]


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_fault_hurts_one_answer(index, device):
    """Case 19. If it is the first, its siblings compute the prompt themselves."""
    rig = Rig(device=device)
    poison(rig, "a" if index == 0 else f"a#{index}")
    output = rig.add("a", PROMPTS[5], seeded(n=3, seed=4))
    rig.run()
    assert rig.is_hit  # type: ignore[attr-defined]
    assert output.finished
    assert isinstance(output.error, RequestFailed)
    reasons = [one.finish_reason for one in output.outputs]
    assert reasons == ["error" if i == index else "length" for i in range(3)]
    for i, tokens in enumerate(plain(PROMPTS[5], 3, 4)):
        assert output.outputs[i].token_ids == ([] if i == index else tokens)


def test_a_sibling_that_cannot_join():
    rig = Rig()
    add = rig.open._add

    def refusing(request: Request) -> None:
        if request.request_id == "a#1":
            raise OSError("on purpose")
        add(request)

    rig.open._add = refusing
    output = rig.add("a", PROMPTS[4], seeded(n=3, seed=4))
    rig.run()
    assert isinstance(output.error, RequestFailed)
    assert [one.finish_reason for one in output.outputs] == ["length", "error", "length"]
    assert output.outputs[2].token_ids == plain(PROMPTS[4], 3, 4)[2]


def test_an_id_in_use_and_a_refused_request_leave_nothing():
    rig = Rig()
    first = rig.add("a", PROMPTS[3], seeded(n=2, seed=1))
    for name in ("a", "a#1"):
        with pytest.raises(RequestError, match="in use"):
            rig.add(name, PROMPTS[3], seeded(n=2))
    with pytest.raises(RequestError, match="max_model_len"):
        rig.add("b", [5] * 500, seeded(n=2))
    assert len(rig.open) == 2
    rig.run()
    assert tokens_of(first) == plain(PROMPTS[3], 2, 1)


# Through LLM.


def answers_of(llm: LLM, text: str, params: SamplingParams) -> RequestOutput:
    (output,) = ask(llm, [text], params)
    return output


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_offline(device):
    """Texts, order, company and the prompt's own text; child 0 equals n = 1."""
    llm = make_llm(device=device)
    wanted = [seeded(n=3, seed=1), greedy(), seeded(n=2, seed=7, logprobs=1)]
    outputs = ask(llm, list(TEXTS[:3]), wanted)
    for output, text, params in zip(outputs, TEXTS, wanted):
        assert output.prompt == text
        assert len(output.outputs) == params.n
        for index, one in enumerate(output.outputs):
            alone = (
                params if params.seed is None else replace(params, n=1, seed=params.seed + index)
            )
            assert one.token_ids == expected(text, alone)
            assert one.text == text_of(one.token_ids)
            assert (one.logprobs is None) == (params.logprobs is None)
    assert len(outputs[2].outputs[1].logprobs) == 12
    assert len(llm._open) == 0
    llm.close()


def test_a_stop_string_ends_one_answer():
    llm = make_llm()
    params = seeded(n=3, seed=1)
    texts = [one.text for one in answers_of(llm, TEXTS[0], params).outputs]
    stop = next(texts[1][i : i + 3] for i in range(len(texts[1]) - 3) if ok(texts, i))
    output = answers_of(llm, TEXTS[0], replace(params, stop=stop))
    assert [one.finish_reason for one in output.outputs] == ["length", "stop", "length"]
    assert output.outputs[1].text == texts[1][: texts[1].index(stop)]
    assert [output.outputs[i].text for i in (0, 2)] == [texts[i] for i in (0, 2)]
    assert not llm._loop.scheduler.has_unfinished()


def ok(texts: list[str], at: int) -> bool:
    piece = texts[1][at : at + 3]
    return piece not in texts[0] and piece not in texts[2]


def test_control_c_ends_all_answers():
    llm = make_llm(device="fake")
    step, calls = llm._loop.step, iter(range(10**9))

    def hooked() -> Any:
        if next(calls) == 7:
            assert len(llm._open) == 6
            signal.raise_signal(signal.SIGINT)
        return step()

    llm._loop.step = hooked  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        ask(llm, list(TEXTS[:2]), seeded(n=3))
    assert len(llm._open) == 0
    assert not llm._loop.scheduler.has_unfinished()
    check_answers(llm)


def test_prompt_is_counted_once():
    llm = make_llm()
    first = answers_of(llm, TEXTS[0], seeded(n=3, seed=1))
    second = answers_of(llm, TEXTS[0], seeded(n=3, seed=1))
    full = (len(ids(TEXTS[0])) - 1) // 4 * 4
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, full)
    assert first.prompt_token_ids == ids(TEXTS[0])
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]
