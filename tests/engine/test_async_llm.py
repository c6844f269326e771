"""The engine as a server sees it, over a scripted engine: text, faults, aborts, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace
from support.scripted_engine import engine_of, scripted_llm, smollm2, text_script

from pelton.config.params import SamplingParams
from pelton.engine import async_llm
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.outputs import CompletionOutput, RequestDelta
from pelton.errors import EngineBusy, EngineDead, RequestError, RequestFailed
from pelton.messages.from_engine import Fault
from pelton.messages.to_engine import Abort

TEXT = "A turbine turns water into light. 😊 Übung: DEFGHIJ, and so on."


def run(main: Callable[[], Awaitable[Any]], timeout: float = 20) -> Any:
    return asyncio.run(asyncio.wait_for(main(), timeout))  # type: ignore[arg-type]


def params(max_tokens: int | None = 200, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **changes)


async def collect(
    llm: AsyncLLM, request_id: str = "r", options: SamplingParams | None = None, **more: Any
) -> tuple[list[CompletionOutput], list[RequestDelta]]:
    """All deltas, and what they add up to."""
    options = options or params()
    outputs = [
        CompletionOutput(i, "", [], 0.0, [] if options.logprobs is not None else None)
        for i in range(options.n)
    ]
    deltas = []
    prompt = more.pop("prompt", "Tell me.")
    async for delta in llm.generate(prompt, options, request_id=request_id, **more):
        deltas.append(delta)
        for part in delta.outputs:
            outputs[part.index].add(part)
    return outputs, deltas


def is_empty(llm: AsyncLLM) -> bool:
    return (
        not llm._streams and not llm._answers and not llm._silent and engine_of(llm).num_open == 0
    )


def test_deltas_add_up_to_the_text():
    async def main() -> None:
        llm = scripted_llm(text_script(TEXT))
        (output,), deltas = await collect(llm)
        assert output.text == TEXT
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.token_ids[-1] == llm.config.generation.eos_token_ids[0]
        assert len(deltas) > 10
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        prompt = (await llm.encode("Tell me.")).tolist()
        assert deltas[0].prompt_token_ids.tolist() == prompt
        assert deltas[0].queue_seconds is not None
        for delta in deltas[1:]:
            assert delta.prompt_token_ids is None
            assert delta.num_prompt_tokens == len(prompt)
        assert is_empty(llm)
        await llm.close()

    run(main)


@pytest.mark.parametrize("step_size", [1, 2, 7, 1000])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_the_answer_and_the_engine(include, step_size):
    """Case 22: nothing of the stop string is shown, and the engine stops working for it."""

    async def main() -> None:
        llm = scripted_llm(text_script(TEXT * 3), step_size=step_size)
        options = params(stop=["DEFGHIJ", "GX"], include_stop_str_in_output=include)
        (output,), deltas = await collect(llm, options=options)
        expected = TEXT[: TEXT.index("DEFGHIJ")] + ("DEFGHIJ" if include else "")
        assert output.text == expected
        assert (output.finish_reason, output.stop_reason) == ("stop", "DEFGHIJ")
        shown = ""
        for delta in deltas:
            shown += delta.outputs[0].text
            assert expected.startswith(shown)
        await asyncio.sleep(0)
        assert is_empty(llm)
        assert isinstance(engine_of(llm).sent[-1], Abort) or step_size == 1000

    run(main)


def test_a_slow_consumer_gets_merged_deltas():
    async def main() -> None:
        llm = scripted_llm(text_script(TEXT))
        stream = llm.generate("x", params(logprobs=1), request_id="r")
        first = await anext(stream)
        while engine_of(llm).num_open:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        rest = [delta async for delta in stream]
        assert len(rest) == 1
        assert rest[0].finished
        parts = first.outputs[0], rest[0].outputs[0]
        assert parts[0].text + parts[1].text == TEXT
        assert [len(part.token_ids) for part in parts] == [len(part.logprobs) for part in parts]

    run(main)


def test_several_answers():
    async def main() -> None:
        llm = scripted_llm(text_script(TEXT))
        outputs, _ = await collect(llm, options=params(n=3, logprobs=2))
        assert [output.text for output in outputs] == [TEXT] * 3
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        assert all(
            list(entry) in ([t, 0, 1], [t, 1], [t, 0])
            for o in outputs
            for t, entry in zip(o.token_ids, o.logprobs)
        )
        assert is_empty(llm)

    run(main)


@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_ends_the_request(n):
    """Case 32."""

    async def main() -> None:
        llm = scripted_llm()
        stream = llm.generate("some words", params(None, n=n), request_id="r")
        async for _ in stream:
            break
        await stream.aclose()
        assert is_empty(llm)

        async def consume() -> None:
            async for _ in llm.generate("some words", params(None, n=n), request_id="r"):
                pass

        for paused in (False, True):  # with tokens and before any
            engine_of(llm).paused = paused
            task = asyncio.create_task(consume())
            await asyncio.sleep(0.05)
            assert engine_of(llm).num_open == n
            task.cancel()
            await asyncio.wait([task])
            assert is_empty(llm)

    run(main)


@pytest.mark.parametrize("n", [1, 2])
def test_abort_by_id(n):
    async def main() -> None:
        llm = scripted_llm(delay=0.001)
        task = asyncio.create_task(collect(llm, options=params(None, n=n)))
        await asyncio.sleep(0.03)
        for _ in range(2):
            await llm.abort("r")
            await llm.abort("nobody")
        outputs, deltas = await task
        assert [output.finish_reason for output in outputs] == ["abort"] * n
        assert all(output.token_ids for output in outputs)
        assert deltas[-1].finished
        assert is_empty(llm)

    run(main)


BAD = [
    {"prompt": [49152]},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": []},
    {"prompt": {"prompt": 5}},
    {"prompt": [5] * 2048},
    {"prompt": "x " * 20000},
    {"prompt": "x", "priority": 3},
    {"prompt": "x", "cache_salt": ""},
    {"prompt": "x", "options": params(logprobs=21)},
    {"prompt": "x", "options": params(logits_processors=["nobody"])},
    {"prompt": "x", "options": params(stop_token_ids=[49152])},
    {"prompt": "x", "options": params(logit_bias={"-1": 5})},
    {"prompt": "x", "options": params(stop=["x" * 20000])},
]


@pytest.mark.parametrize("bad", BAD)
def test_a_wrong_request_is_refused_before_it_leaves(bad):
    """Cases 3 and 26."""

    async def main() -> None:
        llm = scripted_llm(text_script("ok"))
        with pytest.raises(RequestError):
            await collect(llm, **bad)
        assert engine_of(llm).sent == []
        (output,), _ = await collect(llm)
        assert output.text == "ok"
        assert is_empty(llm)

    run(main)


def test_an_id_in_use():
    async def main() -> None:
        llm = scripted_llm()
        stream = llm.generate("x", params(None), request_id="r")
        await anext(stream)
        with pytest.raises(RequestError, match="in use"):
            await collect(llm)
        await stream.aclose()
        (output,), _ = await collect(llm, options=params(3))
        assert len(output.token_ids) == 3

    run(main)


@pytest.mark.parametrize("kind", ["request", "failed"])
def test_a_fault_of_one_request(kind):
    async def main() -> None:
        llm = scripted_llm(delay=0.001)
        witness = asyncio.create_task(collect(llm, "w", params(60)))
        task = asyncio.create_task(collect(llm, "r", params(None, n=2)))
        await asyncio.sleep(0.02)
        engine_of(llm).failures["r"] = Fault(kind, "it broke", "seed")
        with pytest.raises(RequestError if kind == "request" else RequestFailed, match="it broke"):
            await task
        (output,), _ = await witness
        assert len(output.token_ids) == 60
        assert is_empty(llm)

    run(main)


def test_a_failed_answer_takes_the_others_along():
    """At once, whether anybody fetches deltas or not."""

    async def main() -> None:
        scripts = iter([[5, 6, -1], [5] * 10**6])
        llm = scripted_llm(lambda request: next(scripts))
        stream = llm.generate("x", params(None, n=2), request_id="r")
        await anext(stream)
        while engine_of(llm).num_open:
            await asyncio.sleep(0)
        with pytest.raises(RequestFailed, match="-1"):
            async for _ in stream:
                pass
        assert is_empty(llm)

    run(main)


@pytest.mark.parametrize("bad", [-1, 49152, 2**31 - 1])
def test_impossible_ids_from_the_engine(bad):
    """Case 25: one request ends, the loop goes on."""

    async def main() -> None:
        llm = scripted_llm(lambda r: [5, 6, bad, 7] if r.request_id == "bad" else [5] * 40)
        results = await asyncio.gather(
            *(collect(llm, name) for name in ("a", "bad", "b")), return_exceptions=True
        )
        assert isinstance(results[1], RequestFailed)
        assert str(bad) in str(results[1])
        for result in (results[0], results[2]):
            assert len(result[0][0].token_ids) == 40
        assert is_empty(llm)

    run(main)


def test_a_fault_in_making_text(monkeypatch):
    """Case 25, another way: an exception out of the detokenizer."""
    from pelton.tokens.detokenizer import OutputText

    push = OutputText.push

    def failing(self: Any, tokens: Any, **options: Any) -> Any:
        if 13 in tokens:
            raise OverflowError("on purpose")
        return push(self, tokens, **options)

    monkeypatch.setattr(OutputText, "push", failing)

    async def main() -> None:
        llm = scripted_llm(lambda r: [5, 13, 7] if r.request_id == "bad" else [5] * 40)
        results = await asyncio.gather(
            *(collect(llm, name) for name in ("a", "bad")), return_exceptions=True
        )
        assert isinstance(results[1], RequestFailed)
        assert "on purpose" in str(results[1])
        assert len(results[0][0][0].token_ids) == 40
        assert is_empty(llm)

    run(main)


def test_death_reaches_every_stream():
    async def main() -> None:
        llm = scripted_llm(delay=0.001)
        tasks = [asyncio.create_task(collect(llm, f"r{i}", params(None))) for i in range(8)]
        await asyncio.sleep(0.03)
        assert llm.is_alive
        engine_of(llm).die("the engine is gone")
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert str(result) == "the engine is gone"
        assert not llm.is_alive
        assert str(await llm.died()) == "the engine is gone" == str(llm.dead_error)
        with pytest.raises(EngineDead):
            await collect(llm)
        assert not llm._streams
        await llm.close()

    run(main)


def test_large_frames_are_worked_on_in_slices(monkeypatch):
    """With slices of no length, others get their turn between any two answers of a frame; and all
    answers are whole."""
    monkeypatch.setattr(async_llm, "_SLICE_SECONDS", -1.0)

    async def main() -> None:
        llm = scripted_llm(text_script(TEXT), step_size=1000)
        engine_of(llm).paused = True
        tasks = [asyncio.create_task(collect(llm, f"r{i}")) for i in range(32)]
        await asyncio.sleep(0.01)
        engine_of(llm).paused = False
        turns = 0
        while llm._answers:
            if len(llm._answers) < 32:
                turns += 1
            await asyncio.sleep(0)
        assert turns >= 31
        for task in tasks:
            (output,), _ = await task
            assert output.text == TEXT
        assert is_empty(llm)

    run(main)


@pytest.mark.parametrize("change", [{"counts": b"\2\0\0\0"}, {"handles": b"\0" * 7}])
def test_a_frame_that_cannot_be(change):
    """Nobody waits for ever: it is as if the engine had died."""

    async def main() -> None:
        llm = scripted_llm(delay=0.001)
        frame = engine_of(llm)._frame
        tasks = [asyncio.create_task(collect(llm, f"r{i}", params(None))) for i in range(3)]
        await asyncio.sleep(0.02)
        engine_of(llm)._frame = lambda: replace(frame(), **change)  # type: ignore[method-assign]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDead)
        assert not llm.is_alive

    run(main)


def test_the_queue_has_a_limit():
    async def main() -> None:
        llm = scripted_llm(max_num_queued_reqs=2)
        rows = llm.config.scheduler.max_num_seqs
        streams = [llm.generate("x", params(None), request_id=f"r{i}") for i in range(rows + 2)]
        for stream in streams:
            await anext(stream)
        assert llm.stats().num_queued == 2
        with pytest.raises(EngineBusy, match="max_num_queued_reqs=2") as caught:
            await collect(llm, "more")
        assert caught.value.retry_after > 0
        await streams[0].aclose()
        (output,), _ = await collect(llm, "more", params(3))
        assert len(output.token_ids) == 3
        with pytest.raises(EngineBusy):
            await collect(llm, "many", params(3, n=2))
        for stream in streams:
            await stream.aclose()
        assert is_empty(llm)

    run(main)


def test_drain():
    async def main() -> None:
        llm = scripted_llm(delay=0.001)
        task = asyncio.create_task(collect(llm, options=params(30)))
        await asyncio.sleep(0.01)
        drained = asyncio.create_task(llm.drain(10))
        again = asyncio.create_task(llm.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy):
            await collect(llm, "late")
        assert await drained
        assert await again
        (output,), _ = await task
        assert len(output.token_ids) == 30

        llm = scripted_llm(delay=0.001)
        task = asyncio.create_task(collect(llm, options=params(None)))
        await asyncio.sleep(0.01)
        assert not await llm.drain(0.05)
        (output,), _ = await task
        assert output.finish_reason == "abort"
        await llm.close()
        assert engine_of(llm).is_closed

    run(main)


def test_chat_and_long_prompts():
    async def main() -> None:
        llm = scripted_llm(text_script("ok"))
        prompt = await llm.render_chat([{"role": "user", "content": "Hi"}])
        assert prompt["prompt"].endswith("<|im_start|>assistant\n")
        (output,), _ = await collect(llm, prompt=prompt)
        assert output.text == "ok"
        with pytest.raises(RequestError):
            await llm.render_chat([{"role": "user"}])
        text = "word " * 1900
        assert len(text) > 4096
        (output,), deltas = await collect(llm, prompt=text)
        assert deltas[0].num_prompt_tokens == len(smollm2()[2].encode(text))
        assert await llm.reset_prefix_cache()

    run(main)
