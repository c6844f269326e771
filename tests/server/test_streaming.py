"""A whole answer is its chunks joined, however the tokens came."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.texts import END, byte_tokenizer

from pelton.config.params import SamplingParams
from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.answers import Answer
from pelton.engine.outputs import AnswerDelta, RequestDelta
from pelton.sampling.logprobs import Logprob
from pelton.server.prompts import ReadyPrompt
from pelton.server.protocol import (
    ChatBody,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionBody,
    StreamOptions,
)
from pelton.server.sampling import chat_params, completion_params
from pelton.server.streaming import (
    ChatChunker,
    ChatJoiner,
    CompletionChunker,
    CompletionJoiner,
    Head,
)

TOKENIZER = byte_tokenizer()
HEAD = Head("cmpl-1", 1, "tiny")
PROMPT = "aé"
PROMPT_IDS = [*PROMPT.encode()]


def logprob_rows(ids: Sequence[int], width: int = 3) -> LogprobRows:
    """The token is second of its row's `width` most likely ones, or behind them."""
    top = np.array([[(token + 1) % 256, token, 7, 8][:width] for token in ids], np.int32)
    return LogprobRows(
        offsets=np.array([0, len(ids)], np.int32),
        token_logprobs=np.full(len(ids), -1.5, np.float32),
        ranks=np.full(len(ids), 2, np.int32),
        top_ids=top.reshape(len(ids), width),
        top_logprobs=np.array([[-0.5, -1.5, -3.0][:width]] * len(ids), np.float32).reshape(
            len(ids), width
        ),
    )


def deltas(
    params: SamplingParams,
    answers: Sequence[Sequence[int]],
    cuts: Sequence[tuple[int, int]],
    finish: str,
    *,
    has_prompt_logprobs: bool = False,
) -> list[RequestDelta]:
    """What a request yields whose answers' tokens come as `cuts` say: (answer, how many), in turn,
    and at last all that is left."""
    request = Request("r", np.array(PROMPT_IDS, np.int32), params)
    made = [Answer(request, TOKENIZER, index) for index in range(len(answers))]
    places = [0] * len(answers)
    found: list[RequestDelta] = []
    left = [(index, len(tokens)) for index, tokens in enumerate(answers)]
    for index, count in [*cuts, *left]:
        index %= len(answers)
        answer, tokens = made[index], answers[index]
        if answer.is_finished:
            continue
        new = tokens[places[index] : places[index] + count]
        places[index] += len(new)
        ends = places[index] == len(tokens)
        update = RequestUpdate(request, list(new), 0, len(new), finish if ends else None)
        output = answer.take(update, logprob_rows(new))
        delta = RequestDelta("r", [output], False, len(PROMPT_IDS), num_cached_tokens=1)
        if not found and has_prompt_logprobs:
            entries = [
                {token: Logprob(-2.0, 1, "?"), 9: Logprob(-3.0, 2, "?")} for token in PROMPT_IDS
            ]
            delta.prompt_logprobs = [None, *entries[1:]]
        found.append(delta)
    return found


def join_completion(
    body: CompletionBody, parts: Sequence[RequestDelta]
) -> tuple[list[Completion], Completion]:
    prompt = ReadyPrompt(np.array(PROMPT_IDS, np.int32), PROMPT)
    chunker = CompletionChunker(HEAD, body, [prompt], TOKENIZER)
    chunks = [chunk for part in parts for chunk in chunker.chunks(0, part)]
    joiner = CompletionJoiner()
    for chunk in copy.deepcopy([*chunks, chunker.usage_chunk()]):
        joiner.add(chunk)
    whole = joiner.whole()
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in own) == choice.text
    return chunks, whole


def join_chat(
    body: ChatBody, parts: Sequence[RequestDelta]
) -> tuple[list[ChatChunk], ChatCompletion]:
    prompt = ReadyPrompt(np.array(PROMPT_IDS, np.int32), PROMPT)
    chunker = ChatChunker(HEAD, body, prompt, TOKENIZER)
    chunks = [chunk for part in parts for chunk in chunker.chunks(0, part)]
    joiner = ChatJoiner()
    for chunk in [*chunks, chunker.usage_chunk()]:
        joiner.add(chunk)
    return chunks, joiner.whole()


tokens = st.lists(
    st.sampled_from([*b"abcD\n", *"é😊".encode(), 0x80, 0xFF, END]), min_size=1, max_size=12
)
cuts = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=12)
stops = st.sampled_from([None, ["ab"], ["abc", "b"], ["\n"], ["é", "D\ufffd"], ["zz", "ba"]])


@settings(max_examples=150, deadline=None)
@given(
    answers=st.lists(tokens, min_size=1, max_size=3),
    first=cuts,
    second=cuts,
    stop=stops,
    include_stop=st.booleans(),
    echo=st.booleans(),
    logprobs=st.sampled_from([None, 0, 2]),
    finish=st.sampled_from(["length", "stop"]),
)
def test_chunkings_of_a_completion_join_to_one_answer(
    answers: list[list[int]],
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    stop: list[str] | None,
    include_stop: bool,
    echo: bool,
    logprobs: int | None,
    finish: str,
) -> None:
    """Cases 22, 23, 35."""
    body = CompletionBody(
        prompt=PROMPT,
        n=len(answers),
        temperature=1.0,
        max_tokens=20,
        stop=stop,
        include_stop_str_in_output=include_stop,
        echo=echo,
        logprobs=logprobs,
        return_token_ids=True,
    )
    params = completion_params(body, {})
    has_prompt = params.prompt_logprobs is not None
    one = join_completion(
        body, deltas(params, answers, first, finish, has_prompt_logprobs=has_prompt)
    )[1]
    other = join_completion(
        body, deltas(params, answers, second, finish, has_prompt_logprobs=has_prompt)
    )[1]
    assert one == other
    for choice, ids in zip(one.choices, answers):
        assert isinstance(choice.token_ids, list)
        assert choice.token_ids == ids[: len(choice.token_ids)]
        if not stop and finish == "length":
            text = TOKENIZER.decode(ids)
            assert choice.text == (PROMPT if echo else "") + text
        check_offsets(choice.logprobs, choice.text, choice.token_ids, echo=echo)
    usage = one.usage
    assert usage
    assert usage.prompt_tokens == len(PROMPT_IDS)
    assert usage.completion_tokens == sum(
        len(choice.token_ids) for choice in one.choices if isinstance(choice.token_ids, list)
    )


def check_offsets(logprobs: Any, text: str, ids: Sequence[int], *, echo: bool) -> None:
    if logprobs is None:
        return
    num_echoed = len(PROMPT_IDS) if echo else 0
    offsets = logprobs.text_offset
    assert len(offsets) == len(logprobs.tokens) == len(logprobs.token_logprobs)
    assert len(offsets) == num_echoed + len(ids)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    if echo:
        assert logprobs.token_logprobs[0] is None
        assert offsets[: num_echoed + 1] == [0, 1, 1, len(PROMPT)]
    for offset, token in zip(offsets, [*(PROMPT_IDS if echo else []), *ids]):
        if token < 128 and offset < len(text):
            assert text[offset] == chr(token)


@settings(max_examples=150, deadline=None)
@given(
    answers=st.lists(tokens, min_size=1, max_size=3),
    first=cuts,
    second=cuts,
    stop=stops,
    top=st.sampled_from([None, 0, 1, 3]),
    finish=st.sampled_from(["length", "stop"]),
)
def test_chunkings_of_a_chat_join_to_one_answer(
    answers: list[list[int]],
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    stop: list[str] | None,
    top: int | None,
    finish: str,
) -> None:
    """Cases 17, 22, 23."""
    body = ChatBody(
        messages=[{"role": "user", "content": "x"}],
        n=len(answers),
        temperature=1.0,
        stop=stop,
        logprobs=top is not None,
        top_logprobs=top,
        return_token_ids=True,
    )
    params = chat_params(body, {}, max_logprobs=20)
    chunks, one = join_chat(body, deltas(params, answers, first, finish))
    assert one == join_chat(body, deltas(params, answers, second, finish))[1]
    for index, choice in enumerate(one.choices):
        own = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert own[0].delta.content == ""
        assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == choice.finish_reason
        assert all(c.delta.content or c.finish_reason or c.token_ids for c in own[1:])
        assert isinstance(choice.token_ids, list)
        if top is None:
            assert choice.logprobs is None
            continue
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert b"".join(bytes(token.bytes) for token in content) == b"".join(
            TOKENIZER.token_bytes(token) for token in choice.token_ids
        )
        for token in content:
            assert len(token.top_logprobs) == top
            values = [one.logprob for one in token.top_logprobs]
            assert values == sorted(values, reverse=True)
            assert len({tuple(one.bytes) for one in token.top_logprobs}) == top


def test_usage_stands_where_it_was_asked_for() -> None:
    """Case 35."""
    for options, expected in [
        (None, "absent"),
        (StreamOptions(), "absent"),
        (StreamOptions(include_usage=False), "absent"),
        (StreamOptions(include_usage=True), "null"),
        (StreamOptions(include_usage=True, continuous_usage_stats=True), "numbers"),
    ]:
        body = CompletionBody(prompt=PROMPT, stream=True, stream_options=options, max_tokens=3)
        params = completion_params(body, {})
        chunks, _ = join_completion(body, deltas(params, [[97, 98, 99]], [(0, 1)] * 3, "length"))
        for number, chunk in enumerate(chunks, 1):
            if expected == "absent":
                assert not hasattr(chunk.usage, "total_tokens")
                assert chunk.usage is not None
            elif expected == "null":
                assert chunk.usage is None
            else:
                assert chunk.usage is not None
                assert chunk.usage.completion_tokens == number  # type: ignore[union-attr]


def test_empty_chunks_are_not_sent() -> None:
    """Case 22: half a character and the beginning of a stop string are held back without a word."""
    body = CompletionBody(prompt=PROMPT, stop=["xyz"], max_tokens=9)
    ids = [*"é".encode(), *b"xyA"]
    parts = deltas(completion_params(body, {}), [ids], [(0, 1)] * 5, "length")
    chunks, whole = join_completion(body, parts)
    assert [chunk.choices[0].text for chunk in chunks] == ["é", "xyA"]
    assert whole.choices[0].text == "éxyA"


def test_echo_alone() -> None:
    body = CompletionBody(prompt=PROMPT, echo=True, max_tokens=0, logprobs=1)
    params = completion_params(body, {})
    parts = deltas(params, [[97]], [], "length", has_prompt_logprobs=True)
    _, whole = join_completion(body, parts)
    (choice,) = whole.choices
    assert choice.text == PROMPT
    assert choice.logprobs is not None
    assert len(choice.logprobs.tokens) == len(PROMPT_IDS)
    assert whole.usage
    assert whole.usage.completion_tokens == 0


def test_several_prompts_have_their_own_answers() -> None:
    body = CompletionBody(prompt=["a", "b"], n=2, temperature=1.0, echo=True)
    prompts = [
        ReadyPrompt(np.array([97], np.int32), "a"),
        ReadyPrompt(np.array([98], np.int32), "b"),
    ]
    chunker = CompletionChunker(HEAD, body, prompts, TOKENIZER)
    joiner = CompletionJoiner()
    for prompt, index, text in [(1, 0, "x"), (0, 1, "y"), (0, 0, "z"), (1, 1, "w")]:
        answer = AnswerDelta(index, text, [1], None, "length")
        delta = RequestDelta("r", [answer], False, 1, num_cached_tokens=0)
        for chunk in chunker.chunks(prompt, delta):
            joiner.add(chunk)
    joiner.add(chunker.usage_chunk())
    whole = joiner.whole()
    assert [(c.index, c.text) for c in whole.choices] == [
        (0, "az"),
        (1, "ay"),
        (2, "bx"),
        (3, "bw"),
    ]
    assert whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 4)
