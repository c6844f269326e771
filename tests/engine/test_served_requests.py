"""AsyncLLM over a real engine, by way of messages: the answers are those of the offline LLM."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from engine.test_async_llm import collect, run
from engine.test_llm import TEXTS, make_llm, only_for
from support.in_process import InProcessLink, in_process, is_clean
from support.logits import hook_logits
from support.plain import greedy, seeded

from pelton import LLM, SamplingParams
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.served_requests import ServedRequests, read_children
from pelton.errors import RequestError, RequestFailed
from pelton.messages.to_engine import Abort, AddRequest, pack_params, pack_token_ids


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(batch_invariant=True)


async def settled(llm: AsyncLLM) -> None:
    """Until the engine has nothing to do."""
    link = llm._link
    assert isinstance(link, InProcessLink)
    while link.served.has_work() or link._is_scheduled:
        await asyncio.sleep(0)


MANY: list[SamplingParams] = [
    greedy(),
    seeded(seed=3),
    seeded(seed=3, n=3),
    greedy(logprobs=3),
    seeded(seed=5, logprobs=0, prompt_logprobs=2),
    greedy(stop=["e", "\n"], min_tokens=3),
    seeded(seed=8, stop=["t"], include_stop_str_in_output=True, logprobs=1),
    greedy(stop_token_ids=list(range(150, 300))),
    greedy(detokenize=False),
    seeded(seed=1, presence_penalty=1.0, logit_bias={"5": 20}, bad_words=["a"]),
    greedy(1),
    greedy(n=3),
    greedy(40, prompt_logprobs=0),
]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    "changes",
    [{}, {"device": "fake"}, {"speculative_config": NGRAM}],
    ids=["cpu", "fake", "drafts"],
)
def test_answers_are_those_of_the_offline_engine(changes):
    """All together, arriving at odd moments, in two rows; joined deltas equal the whole output."""
    llm = make_llm(batch_invariant=True, **changes)
    texts = [TEXTS[index % 4] for index in range(len(MANY))]
    wanted = [llm.generate(text, one, use_tqdm=False)[0] for text, one in zip(texts, MANY)]

    async def main() -> Any:
        served = in_process(llm)
        rng = random.Random(1)

        async def one(index: int) -> Any:
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            return await collect(served, str(index), MANY[index], prompt=texts[index])

        found = await asyncio.gather(*(one(index) for index in range(len(MANY))))
        await settled(served)
        assert is_clean(served)
        return found

    found = run(main)
    if "speculative_config" in changes:
        sizes = [len(one.token_ids) for _, deltas in found for d in deltas for one in d.outputs]
        assert max(sizes) > 1, "no draft was accepted"
    for whole, (outputs, deltas) in zip(wanted, found, strict=True):
        assert outputs == _strip(whole.outputs, outputs)
        assert deltas[0].prompt_token_ids.tolist() == whole.prompt_token_ids
        assert deltas[0].prompt_logprobs == whole.prompt_logprobs
    llm.close()


def _strip(wanted: Any, found: Any) -> Any:
    """`collect` keeps a sum of log-probabilities even where nobody asked."""
    for one, other in zip(wanted, found, strict=True):
        if one.cumulative_logprob is None:
            one.cumulative_logprob = other.cumulative_logprob
    return wanted


def test_cached_tokens_and_preemptions_are_told(llm):
    async def main() -> None:
        served = in_process(llm)
        assert await served.reset_prefix_cache()
        _, first = await collect(served, "a", greedy(), prompt=TEXTS[0] * 2)
        _, second = await collect(served, "b", greedy(), prompt=TEXTS[0] * 2)
        assert first[0].num_cached_tokens == 0
        assert second[0].num_cached_tokens == (second[0].num_prompt_tokens - 1) // 4 * 4 > 0
        assert 0 <= second[0].queue_seconds < 5
        stats = served.stats()
        assert stats.scheduler.num_cache_hits >= second[0].num_cached_tokens
        assert stats.step.num_tokens == 1
        assert stats.num_open == stats.num_queued == stats.scheduler.num_running == 0

        scheduler = llm._loop.scheduler
        stream = served.generate(TEXTS[1], greedy(20), request_id="c")
        await anext(stream)
        assert scheduler.preempt(next(iter(scheduler._requests)))
        deltas = [delta async for delta in stream]
        assert deltas[-1].num_preemptions == 1

    run(main)


def test_reset_is_refused_while_requests_run(llm):
    async def main() -> None:
        served = in_process(llm)
        stream = served.generate(TEXTS[1], greedy(20), request_id="c")
        await anext(stream)
        assert not await served.reset_prefix_cache()
        await stream.aclose()
        await settled(served)
        assert await served.reset_prefix_cache()

    run(main)


@pytest.mark.parametrize("stage", ["add", "sampler", "head"])
def test_a_fault_in_the_engine_hurts_one_request(stage):
    """Cases 19 and 26, beyond the front end's own checks."""
    llm = make_llm(max_num_seqs=3)
    victim = llm.get_tokenizer().encode(TEXTS[1]).tolist()
    runner = llm._worker._assembled.runner
    if stage == "add":
        llm._loop.scheduler.add = only_for(  # type: ignore[method-assign]
            llm._loop.scheduler.add, lambda request: request.known_token_ids.tolist() == victim
        )
    elif stage == "sampler":
        runner._add_hooks = tuple(
            only_for(hook, lambda row: row.token_ids.tolist() == victim)
            for hook in runner._add_hooks
        )

    async def main() -> None:
        served = in_process(llm)
        if stage == "head":
            calls = iter(range(10**9))

            def change(logits: Any) -> None:
                if next(calls) == 3:
                    logits[1] = float("nan")

            hook_logits(llm._worker.model, change)
        found = await asyncio.gather(
            *(collect(served, f"r{i}", greedy(), prompt=TEXTS[i]) for i in range(3)),
            return_exceptions=True,
        )
        assert isinstance(found[1], RequestFailed)
        assert "r1" in str(found[1])
        for index in (0, 2):
            assert len(found[index][0][0].token_ids) == 12
        await settled(served)
        assert is_clean(served)

    run(main)
    llm.close()


@pytest.mark.parametrize(
    ("params", "ids", "field"),
    [
        ({"max_tokens": 0}, [5], "max_tokens"),
        ({"temprature": 1}, [5], None),
        ({"n": "x"}, [5], "n"),
        ({}, [9999], "prompt_token_ids"),
        ({}, [], "prompt_token_ids"),
        ({}, [5] * 96, "prompt_token_ids"),
        ({"stop_token_ids": [9999]}, [5], "stop_token_ids"),
        ({"logits_processors": ["nobody"]}, [5], "logits_processors"),
        ({"n": 3, "logit_bias": {9999: 1}}, [5], "logit_bias"),
    ],
)
def test_what_a_front_end_ought_to_have_refused(llm, params, ids, field):
    """The engine checks again, and every answer that was asked for gets its end."""
    served = ServedRequests(llm._loop)
    message = AddRequest(7, "r", pack_token_ids(_ids(ids)), params)
    served.add(message, read_children(message))
    ended = served.current().ended
    count = params.get("n", 1)
    assert [one.handle for one in ended] == list(range(7, 7 + (count if count != "x" else 1)))
    for one in ended:
        assert one.reason == "error"
        assert one.fault.field == field
        assert one.fault.kind == ("failed" if field is None else "request")
    assert len(served) == 0
    assert not served.has_work()


def _ids(ids: list[int]) -> Any:
    return np.array(ids, np.int32)


def test_a_sibling_that_cannot_join(llm):
    """The others are served; it ends with the error."""

    async def main() -> None:
        served = in_process(llm)
        add = llm._loop.scheduler.add
        llm._loop.scheduler.add = only_for(  # type: ignore[method-assign]
            add, lambda request: request.request_id.endswith("#1")
        )
        try:
            with pytest.raises(RequestFailed, match="on purpose"):
                await collect(served, "r", seeded(n=3))
        finally:
            llm._loop.scheduler.add = add  # type: ignore[method-assign]
        await settled(served)
        assert is_clean(served)

    run(main)


@pytest.mark.parametrize("first", [0, 1])
def test_abort_of_single_answers_before_they_have_begun(llm, first):
    """Whoever is left goes on, whether the prompt's own child is among them or not."""
    served = ServedRequests(llm._loop)
    ids = pack_token_ids(llm.get_tokenizer().encode(TEXTS[0]))
    message = AddRequest(0, "r", ids, pack_params(seeded(n=3, seed=2)))
    served.add(message, read_children(message))
    served.abort(Abort(first, 1))
    ended = []
    before = llm.stats.num_generated_tokens
    while served.has_work():
        for frame in served.step():
            ended += [one.handle for one in frame.ended]
    assert sorted(ended) == [handle for handle in range(3) if handle != first]
    assert llm.stats.num_generated_tokens - before == 24
    assert len(served) == len(served._siblings) == 0
    for handle in (0, 1, 99):
        served.abort(Abort(handle, 5))


async def storm(llm: AsyncLLM, count: int, rng: random.Random, most: int) -> int:
    """count requests, each left after 0 to `most` turns of the event loop; half of them n=3, some
    aborted by id first. Returns how many came to their end."""
    text = " ".join(TEXTS)[:70]
    ended = 0

    async def one(index: int) -> None:
        nonlocal ended
        params = seeded(None, n=rng.choice([1, 3]), logprobs=rng.choice([None, 1]))
        async for delta in llm.generate(text, params, request_id=f"r{index}"):
            ended += delta.finished

    async def cancelled(index: int) -> None:
        task = asyncio.create_task(one(index))
        for _ in range(rng.randrange(most)):
            await asyncio.sleep(0)
        if rng.random() < 0.2:
            await llm.abort(f"r{index}")
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    for start in range(0, count, 20):
        await asyncio.gather(*(cancelled(i) for i in range(start, min(start + 20, count))))
    await settled(llm)
    return ended


def test_cancelled_requests_leave_nothing(llm):
    """Case 32, scaled down: before, during and after the hand-over to the engine."""

    async def main() -> None:
        served = in_process(llm)
        ended = await storm(served, 160, random.Random(3), 60)
        assert ended < 160
        assert is_clean(served)
        (output,), _ = await collect(served, "after", greedy(), prompt=TEXTS[0])
        assert len(output.token_ids) == 12

    run(main, 120)


def test_cancelled_requests_do_not_grow_memory(llm):
    async def main() -> None:
        served = in_process(llm)
        await storm(served, 20, random.Random(5), 40)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        await storm(served, 100, random.Random(6), 40)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert is_clean(served)
        assert after - before < 100_000

    run(main, 120)


def test_refused_requests_are_told_apart(llm):
    """An id that the front end may use again at once is not taken for the old one."""

    async def main() -> None:
        served = in_process(llm)
        for count in range(5):
            stream = served.generate(TEXTS[0], greedy(), request_id="same")
            for _ in range(count):
                await anext(stream)
            await stream.aclose()
            (output,), _ = await collect(served, "same", greedy(), prompt=TEXTS[0])
            assert len(output.token_ids) == 12
        with pytest.raises(RequestError):
            await collect(served, "same", greedy(), prompt=[9999])
        await settled(served)
        assert is_clean(served)

    run(main)
