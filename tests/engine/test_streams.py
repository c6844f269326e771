"""One open request, on its own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine.test_async_llm import run

from pelton.config.params import SamplingParams
from pelton.core.request import Request
from pelton.engine.outputs import AnswerDelta
from pelton.engine.streams import Stream
from pelton.errors import RequestFailed
from pelton.messages.from_engine import Ended, First
from pelton.messages.logprobs import PackedRows


def stream_of(n: int = 1, prompt: tuple[int, ...] = (5, 6, 7), **changes: object) -> Stream:
    params = SamplingParams(n=n, **changes)  # type: ignore[arg-type]
    return Stream(Request("r", prompt, params), 10, None)


def test_deltas_are_merged_by_answer():
    async def main() -> None:
        stream = stream_of(2)
        stream.note_first(First(10, 2, 0.5))
        stream.put(AnswerDelta(1, "x", [1]))
        stream.put(AnswerDelta(0, "a", [2], [{}]))
        stream.put(AnswerDelta(0, "b", [3, 4], [{}, {}], "stop", "b"))
        delta = await stream.next()
        assert delta.outputs == [
            AnswerDelta(0, "ab", [2, 3, 4], [{}, {}, {}], "stop", "b"),
            AnswerDelta(1, "x", [1]),
        ]
        assert (delta.finished, delta.num_cached_tokens, delta.queue_seconds) == (False, 2, 0.5)
        assert delta.prompt_token_ids.tolist() == [5, 6, 7]
        stream.note_end(Ended(11, "length", 3))
        stream.put(AnswerDelta(1, finish_reason="length"))
        delta = await stream.next()
        assert delta.outputs == [AnswerDelta(1, finish_reason="length")]
        assert (delta.finished, delta.num_preemptions, delta.queue_seconds) == (True, 3, None)
        assert stream.is_finished

    run(main)


def test_who_waits_is_woken_by_news_and_by_faults():
    async def main() -> None:
        stream = stream_of()
        task = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.put(AnswerDelta(0, "a", [1]))
        stream.put(AnswerDelta(0, "b", [2]))
        assert (await task).outputs[0].text == "ab"
        task = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.fail(RequestFailed("first"))
        stream.fail(RequestFailed("second"))
        with pytest.raises(RequestFailed, match="first"):
            await task

    run(main)


def test_what_came_before_a_fault_is_not_lost():
    async def main() -> None:
        stream = stream_of()
        stream.put(AnswerDelta(0, "a", [1]))
        stream.put(AnswerDelta(0, finish_reason="error", error=RequestFailed("no")))
        delta = await stream.next()
        assert delta.outputs[0].text == "a"
        assert not delta.finished
        with pytest.raises(RequestFailed):
            await stream.next()

    run(main)


def test_being_cancelled_while_waiting():
    async def main() -> None:
        stream = stream_of()
        task = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        task.cancel()
        stream.put(AnswerDelta(0, "a", [1]))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await stream.next()).outputs[0].text == "a"

    run(main)


def test_prompt_logprobs_come_with_the_first_delta():
    async def main() -> None:
        stream = stream_of(prompt_logprobs=0)
        rows = PackedRows(
            0, np.array([-1, -2], "<f4").tobytes(), np.array([1, 9], "<i4").tobytes(), b"", b""
        )
        stream.note_first(First(10, 0, 0.0, rows))
        stream.put(AnswerDelta(0, "a", [1]))
        delta = await stream.next()
        assert [None if one is None else list(one) for one in delta.prompt_logprobs] == [
            None,
            [6],
            [7],
        ]
        assert delta.prompt_logprobs[2][7].logprob == -2
        stream.put(AnswerDelta(0, "b", [1]))
        assert (await stream.next()).prompt_logprobs is None

    run(main)
