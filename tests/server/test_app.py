"""The endpoints over a scripted engine."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from typing import Any

import httpx
import msgspec
import pytest
from support.scripted_engine import echo_script, engine_of, scripted_llm, text_script
from support.serving import run, served

from pelton.messages.from_engine import Fault
from pelton.messages.to_engine import AddRequest
from pelton.server.protocol import ChatBody, TokenizeBody
from pelton.tokens import template_sandbox

TEXT = "A turbine turns water into light. 😊 DEFGHIJ, and so on."
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEMPLATE_FIELDS = {
    "add_generation_prompt",
    "continue_final_message",
    "documents",
    "chat_template",
    "chat_template_kwargs",
}
HELLO = [{"role": "user", "content": "Hello"}]


def test_a_whole_completion_is_the_joined_stream() -> None:
    async def main() -> None:
        async with served(scripted_llm(text_script(TEXT))) as server:
            body = {"prompt": "Tell me.", "max_tokens": 99, "logprobs": 1}
            whole = (await server.post(COMPLETIONS, body)).json()
            *chunks, done = await server.events(COMPLETIONS, body)
            assert done == "[DONE]"
            (choice,) = whole["choices"]
            parts = [chunk["choices"][0] for chunk in chunks]
            assert choice["text"] == TEXT == "".join(part["text"] for part in parts)
            assert choice["finish_reason"] == parts[-1]["finish_reason"] == "stop"
            for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
                joined = [item for part in parts for item in (part["logprobs"] or {}).get(name, [])]
                assert choice["logprobs"][name] == joined
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert whole["object"] == chunks[0]["object"] == "text_completion"
            assert whole["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"])

    run(main)


def test_shape_of_a_streamed_chat() -> None:
    async def main() -> None:
        async with served(scripted_llm(text_script("Hi there."))) as server:
            body = {"messages": HELLO, "stream_options": {"include_usage": True}}
            *chunks, last, done = await server.events(CHAT, body)
            assert done == "[DONE]"
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == "Hi there."
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["stop"]
            assert last["choices"] == []
            whole = (await server.post(CHAT, {"messages": HELLO})).json()
            assert last["usage"] == whole["usage"]
            assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hi there."}
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert whole["object"] == "chat.completion"

    run(main)


def test_several_answers_interleave() -> None:
    async def main() -> None:
        async with served(scripted_llm(text_script("One two three."))) as server:
            chunks = await server.events(CHAT, {"messages": HELLO, "n": 3, "temperature": 1})
            texts = {0: "", 1: "", 2: ""}
            for chunk in chunks[:-1]:
                (choice,) = chunk["choices"]
                texts[choice["index"]] += choice["delta"].get("content", "")
            assert set(texts.values()) == {"One two three."}
            body = {"prompt": ["a b", "c d"], "n": 2, "temperature": 1, "max_tokens": 99}
            whole = (await server.post(COMPLETIONS, body)).json()
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
            sent = [m for m in engine_of(server.state.engine).sent if isinstance(m, AddRequest)]
            assert len({message.request_id for message in sent}) == 3

    run(main)


WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    # case 26: ids outside the vocabulary
    (COMPLETIONS, {"prompt": [999999]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [2**40]]}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [999999], "min_tokens": 1}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [2**70]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"999999": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"-1": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"5": 1e300}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [10**9]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "bad_words": [""]}, "bad_words"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 10**6}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 10**6}, "prompt_logprobs"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    # wrong values
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 1025}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 16000, "temperature": 1}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": "2"}, "n"),
    (COMPLETIONS, {"prompt": "x", "temperature": 100.5}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": 1e300}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "seed"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2**70}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": ["x" * 20000]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "priority": 1}, "priority"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "request_id": "a\nb"}, "request_id"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (
        CHAT,
        {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3},
        "max_completion_tokens",
    ),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "echo": True}, "echo"),
    (CHAT, {"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    # unknown and unsupported
    (COMPLETIONS, {"prompt": "x", "temprature": 1}, "temprature"),
    (
        CHAT,
        {"messages": HELLO, "stream": True, "stream_options": {"usage": 1}},
        "stream_options.usage",
    ),
    (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    (COMPLETIONS, {"prompt": "x", "best_of": 2}, "best_of"),
    (COMPLETIONS, {"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": 1}, "use_beam_search"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"messages": HELLO, "model": "gpt-4"}, "model"),
    # case 36: conversations that templates refuse
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    (
        CHAT,
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        None,
    ),
]


def test_wrong_requests_are_told_so_by_name_and_hurt_nobody() -> None:
    """Cases 26, 36: an answer of 400 (404 for a model) that names the field; none reaches the
    engine; a witness stream goes on and requests after it work."""

    async def main() -> None:
        llm = scripted_llm(echo_script, delay=0.002)
        async with served(llm) as server:
            witness = asyncio.create_task(
                server.events(COMPLETIONS, {"prompt": "la la", "max_tokens": 200})
            )
            while not engine_of(llm).sent:
                await asyncio.sleep(0.001)
            for path, body, field in WRONG:
                for stream in (False, True):
                    if stream and "stream_options" in body:
                        continue
                    response = await server.post(path, {"stream": stream, **body})
                    assert response.status_code == (404 if field == "model" else 400), (
                        body,
                        response.text,
                    )
                    error = response.json()["error"]
                    assert error["type"] == "invalid_request_error"
                    assert error["message"]
                    if field is not None:
                        assert error["param"] == field, (body, error)

            assert len([m for m in engine_of(llm).sent if isinstance(m, AddRequest)]) == 1
            events = await witness
            assert sum(len(e["choices"]) for e in events[:-1]) == 200
            good = await server.post(COMPLETIONS, {"prompt": "x"})
            assert good.status_code == 200

    run(main)


GARBAGE: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"{}x",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"\xff": 1}',
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "n": 1.0e400}',
    b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b'[{"a":' * 5000 + b"1" + b"}]" * 5000 + b"}",
    b"[" * 1_000_000,
    b'{"prompt": [' + b"1," * 1_000_000 + b"1]}",
    b'{"logit_bias": {"1": {}}, "prompt": "x"}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": '
    + b'{"a":' * 300
    + b"1"
    + b"}" * 300
    + b"}",
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_garbage_is_refused(path: str) -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            for body in GARBAGE:
                response = await server.client.post(
                    path, content=body, headers={"content-type": "application/json"}
                )
                assert response.status_code == 400, (body[:80], response.text)
                assert response.json()["error"]["message"]
            for kind in (
                "text/plain",
                "",
                "application/x-www-form-urlencoded",
                "multipart/form-data",
            ):
                response = await server.client.post(
                    path, content=b'{"prompt": "x"}', headers={"content-type": kind}
                )
                assert response.status_code == 415, kind
            for method in ("GET", "PUT", "DELETE", "PATCH"):
                response = await server.client.request(method, path)
                assert response.status_code == 405
                assert response.headers["allow"] == "POST"
                assert response.json()["error"]["type"] == "invalid_request_error"
            assert (await server.client.get("/nothing")).status_code == 404

    run(main)


def test_large_bodies_are_refused_early_and_the_answer_arrives() -> None:
    async def main() -> None:
        async with served(scripted_llm(), max_body_bytes=100_000) as server:
            body = {"prompt": "x" * 50_000_000}
            response = await server.post(COMPLETIONS, body)
            assert response.status_code == 413
            assert "100000" in response.json()["error"]["message"]

            async def pieces() -> Any:
                for _ in range(500):
                    yield b" " * 10_000

            response = await server.client.post(
                COMPLETIONS, content=pieces(), headers={"content-type": "application/json"}
            )
            assert response.status_code == 413
            # A client that sends it all before it reads must find an answer, and no broken line.
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 30000000\r\n\r\n"
            )
            for _ in range(30):
                writer.write(b" " * 1_000_000)
                await writer.drain()
            assert b"413" in await reader.readline()
            async with asyncio.timeout(5):
                await reader.read()  # nobody may go on sending on this connection
            writer.close()
            # A client that asks first need not send it at all.
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 50000000\r\nExpect: 100-continue\r\n\r\n"
            )
            assert b"413" in await reader.readline()
            writer.close()

    run(main)


def test_prompts_that_are_surely_too_long_are_not_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            reader = server.state.reader

            def encode(*arguments: Any) -> Any:
                raise AssertionError("it was tokenized")

            monkeypatch.setattr(reader, "_encode", encode)
            for path, body in [
                (COMPLETIONS, {"prompt": "x" * 5_000_000}),
                (CHAT, {"messages": [{"role": "user", "content": "é" * 2_500_000}]}),
                (COMPLETIONS, {"prompt": [1] * 5_000}),
            ]:
                response = await server.post(path, body)
                assert response.status_code == 400
                assert response.json()["error"]["code"] == "context_length_exceeded"
            monkeypatch.undo()
            body = {"prompt": "word " * 5_000, "truncate_prompt_tokens": 7, "max_tokens": 1}
            answer = (await server.post(COMPLETIONS, body)).json()
            assert answer["usage"]["prompt_tokens"] == 7

    run(main)


def test_keys_guard_what_costs_something() -> None:
    async def main() -> None:
        async with served(scripted_llm(), keys=["alpha", "beta"]) as server:
            body = {"prompt": "x", "max_tokens": 1}
            for given in [None, "alpha", "Bearer gamma", "Bearer", "Bearer alph", "Basic alpha"]:
                headers = {} if given is None else {"authorization": given}
                for path in (COMPLETIONS, "/tokenize"):
                    response = await server.post(path, body, headers=headers)
                    assert response.status_code == 401, given
                    assert response.json()["error"]["code"] == "invalid_api_key"
                    assert response.headers["www-authenticate"] == "Bearer"
            for key in ("alpha", "beta"):
                headers = {"authorization": f"Bearer {key}"}
                response = await server.post(COMPLETIONS, body, headers=headers)
                assert response.status_code == 200
            assert (await server.client.get("/v1/models")).status_code == 401
            for path in ("/health", "/metrics", "/version", "/load", "/openapi.json"):
                assert (await server.client.get(path)).status_code == 200

    run(main)


def test_browsers_of_other_origins_are_let_in_only_if_named() -> None:
    async def main() -> None:
        headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
        async with served(scripted_llm()) as server:
            response = await server.client.options(CHAT, headers=headers)
            assert "access-control-allow-origin" not in response.headers
        async with served(
            scripted_llm(), allowed_origins=["https://a.example"], keys=["k"]
        ) as server:
            response = await server.client.options(CHAT, headers=headers)
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            response = await server.post(CHAT, {}, headers={"origin": "https://a.example"})
            assert response.status_code == 401
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            response = await server.client.options(CHAT, headers={**headers, "origin": "https://b"})
            assert "access-control-allow-origin" not in response.headers
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            assert "https://b may not" in response.json()["error"]["message"]
            assert "origin is not allowed" in response.json()["error"]["message"]

    run(main)


def test_what_is_rendered_for_a_chat_can_be_tokenized() -> None:
    """Fields that both bodies have are the same ones; and all that the template sees is in both."""
    chat, tokenize = (
        {field.name: field for field in msgspec.structs.fields(kind)}
        for kind in (ChatBody, TokenizeBody)
    )
    shared = set(chat) & set(tokenize)
    assert shared == {"model", "messages", "add_special_tokens", *TEMPLATE_FIELDS}
    for name in shared - {"messages"}:
        assert chat[name].type == tokenize[name].type, name
        assert chat[name].default == tokenize[name].default, name
    assert tokenize["messages"].type == chat["messages"].type | None


def test_a_history_with_tool_calls() -> None:
    """As OpenAI's clients send it back, although this version offers no tools."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}

    async def main() -> None:
        async with served(scripted_llm(text_script("It is 42."))) as server:
            for message in (called, {**called, "content": ""}, {**called, "refusal": None}):
                body = {"messages": [*HELLO, message, result]}
                answer = await server.post(CHAT, body)
                assert answer.status_code == 200, answer.text
            body = {"messages": [*HELLO, {**called, "tool_calls": []}, result]}
            refused = await server.post(CHAT, body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "messages[1].content"

    run(main)


def test_request_ids() -> None:
    """The client's name is shown, ours is unique, and names used twice are no trouble."""

    async def main() -> None:
        async with served(scripted_llm(delay=0.01)) as server:
            body = {"prompt": "x", "max_tokens": 5}
            headers = {"x-request-id": "mine"}
            answers = await asyncio.gather(
                *(server.post(COMPLETIONS, body, headers=headers) for _ in range(4))
            )
            assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
            assert len({answer.json()["id"] for answer in answers}) == 4
            answer = await server.post(COMPLETIONS, {**body, "request_id": "his"})
            assert answer.headers["x-request-id"] == "his"
            answer = await server.post(COMPLETIONS, body)
            assert answer.headers["x-request-id"].startswith("req-")
            answer = await server.post(COMPLETIONS, {**body, "request_id": "his"}, headers=headers)
            assert answer.headers["x-request-id"] == "mine"

    run(main)


def test_every_answer_carries_a_request_id() -> None:
    """The client's, if it has one, and else ours; whatever the answer is."""

    async def main() -> None:
        options: dict[str, Any] = {"allowed_origins": ["https://a"], "max_body_bytes": 50}
        async with served(scripted_llm(), keys=["k"], **options) as server:
            key = {"authorization": "Bearer k"}
            preflight = {"origin": "https://a", "access-control-request-method": "POST"}
            requests: list[tuple[str, str, dict[str, str], dict[str, Any], int]] = [
                ("GET", "/health", {}, {}, 200),
                ("GET", "/", {}, {}, 200),
                ("GET", "/metrics", {}, {}, 200),
                ("GET", "/openapi.json", {}, {}, 200),
                ("POST", COMPLETIONS, key, {"json": {"prompt": "x"}}, 200),
                ("POST", COMPLETIONS, key, {"json": {"prompt": "x", "stream": True}}, 200),
                ("POST", COMPLETIONS, key, {"json": {}}, 400),
                ("POST", COMPLETIONS, {}, {"json": {}}, 401),
                ("POST", COMPLETIONS, key, {"json": {"prompt": "x" * 99}}, 413),
                ("POST", COMPLETIONS, key, {"content": b"x"}, 415),
                ("GET", COMPLETIONS, {}, {}, 405),
                ("GET", "/nothing", {}, {}, 404),
                ("OPTIONS", COMPLETIONS, preflight, {}, 200),
                ("OPTIONS", COMPLETIONS, {**preflight, "origin": "https://b"}, {}, 400),
            ]
            for method, path, headers, content, status in requests:
                for name in (None, "mine"):
                    sent = headers if name is None else {**headers, "x-request-id": name}
                    response = await server.client.request(method, path, headers=sent, **content)
                    assert response.status_code == status, (method, path)
                    (shown,) = response.headers.get_list("x-request-id")
                    assert shown == name or (name is None and shown.startswith("req-"))

    run(main)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x" * 201], "200 printable ASCII characters, got 201 characters"),
        (["caf\u00e9"], "200 printable ASCII characters, got 'caf\u00e9'"),
        (["a\tb"], "200 printable ASCII characters, got 'a\\tb'"),
        ([""], "1 to 200"),
        (["one", "two"], "once, got 2"),
    ],
)
def test_odd_request_ids_are_refused(given: list[str], words: str) -> None:
    """And not replaced: whoever sends one looks for it in answers and logs."""

    async def main() -> None:
        async with served(scripted_llm()) as server:
            headers = [(b"x-request-id", value.encode("latin-1")) for value in given]
            for method, path in [
                ("POST", COMPLETIONS),
                ("GET", "/health"),
                ("GET", "/nothing"),
                ("PUT", "/health"),
            ]:
                response = await server.client.request(method, path, headers=headers)
                assert response.status_code == 400, path
                error = response.json()["error"]
                assert words in error["message"]
                assert error["param"] == "X-Request-Id"
                assert response.headers["x-request-id"].startswith("req-")

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    """Case 32: before the answer begins, and in its middle."""

    async def main() -> None:
        llm = scripted_llm(echo_script, delay=0.005)
        engine = engine_of(llm)
        async with served(llm) as server:
            for path, body in [
                (COMPLETIONS, {"prompt": "x y z", "max_tokens": 2000}),
                (
                    COMPLETIONS,
                    {"prompt": ["x y z", "a"], "n": 2, "temperature": 1, "max_tokens": 1999},
                ),
                (CHAT, {"messages": HELLO}),
            ]:
                for paused in (True, False):
                    engine.paused = paused
                    request = asyncio.create_task(server.post(path, {**body, "stream": stream}))
                    while engine.num_open == 0:
                        await asyncio.sleep(0.002)
                    await asyncio.sleep(0.03)
                    request.cancel()
                    async with asyncio.timeout(3):
                        while engine.num_open or llm.stats().num_open or server.state.in_flight.now:
                            await asyncio.sleep(0.005)
            engine.paused = False
            assert (await server.post(COMPLETIONS, {"prompt": "x"})).status_code == 200
            text = (await server.client.get("/metrics")).text
            (line,) = [one for one in text.splitlines() if 'finished_reason="abort"' in one]
            assert float(line.split()[-1]) == 2 * (1 + 4 + 1)

    run(main)


def test_a_fault_of_the_engine_ends_one_request_with_500() -> None:
    async def main() -> None:
        llm = scripted_llm(echo_script, delay=0.002)
        engine = engine_of(llm)
        async with served(llm) as server:
            engine.paused = True
            body = {"prompt": "x", "max_tokens": 50}
            whole = asyncio.create_task(server.post(COMPLETIONS, body))
            stream = asyncio.create_task(server.events(COMPLETIONS, body))
            while len(engine.sent) < 2:
                await asyncio.sleep(0.002)
            engine.paused = False
            await asyncio.sleep(0.03)
            for message in engine.sent:
                assert isinstance(message, AddRequest)
                engine.failures[message.request_id] = Fault("failed", "NaN logits")
            response = await whole
            assert response.status_code == 500
            assert response.json()["error"] == {
                "message": "NaN logits",
                "type": "server_error",
                "param": None,
                "code": None,
            }
            events = await stream
            assert events[-1] == response.json()
            assert "[DONE]" not in events
            assert events[0]["choices"]

    run(main)


def test_death_of_the_engine_reaches_everybody() -> None:
    async def main() -> None:
        llm = scripted_llm(echo_script, delay=0.002)
        async with served(llm) as server:
            assert (await server.client.get("/health")).status_code == 200
            body = {"prompt": "x", "max_tokens": 2000}
            whole = asyncio.create_task(server.post(COMPLETIONS, body))
            stream = asyncio.create_task(server.events(COMPLETIONS, body))
            while llm.stats().step.num_rows < 2:
                await asyncio.sleep(0.002)
            assert (await server.client.get("/load")).json()["num_requests_running"] == 2
            assert (await server.client.get("/stats")).json()["kv_cache_usage"] > 0
            engine_of(llm).die()
            assert (await whole).status_code == 503
            assert (await stream)[-1]["error"]["type"] == "service_unavailable_error"
            assert (await server.client.get("/health")).status_code == 503
            response = await server.post(COMPLETIONS, body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            load = (await server.client.get("/load")).json()
            assert load == {"server_load": 0, "num_requests_running": 0, "num_requests_waiting": 0}
            stats = (await server.client.get("/stats")).json()
            assert (stats["is_alive"], stats["kv_cache_usage"]) == (False, 0)
            assert stats["generation_tokens"] > 0, "what was done stays done"
            metrics = await server.client.get("/metrics")
            assert metrics.status_code == 200
            assert re.search(r"^pelton:num_requests_running\S* 0\.0$", metrics.text, re.MULTILINE)

    run(main)


@pytest.mark.parametrize(
    ("url", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "x", "n": 200, "temperature": 1.0}, "n"),
        (COMPLETIONS, {"prompt": ["x"] * 200}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 200, "temperature": 1.0}, "n"),
    ],
)
def test_what_never_fits_the_queue_is_not_told_to_come_again(
    url: str, body: dict[str, Any], field: str
) -> None:
    async def main() -> None:
        llm = scripted_llm(echo_script, max_num_queued_reqs=2)
        assert llm.max_answers is not None
        assert llm.max_answers < 200
        async with served(llm) as server:
            response = await server.post(url, {**body, "max_tokens": 1})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == field
            assert f"{llm.max_answers} at once" in error["message"]

    run(main)


def test_a_full_queue_is_told_with_503() -> None:
    async def main() -> None:
        llm = scripted_llm(echo_script, max_num_queued_reqs=2)
        engine = engine_of(llm)
        async with served(llm) as server:
            engine.paused = True
            rows = llm.config.scheduler.max_num_seqs
            body = {"prompt": "x", "max_tokens": 1}
            tasks = [asyncio.create_task(server.post(COMPLETIONS, body)) for _ in range(rows + 2)]
            while len(engine.sent) < rows + 2:
                await asyncio.sleep(0.002)
            load = (await server.client.get("/load")).json()
            assert load["server_load"] == rows + 2
            assert load["num_requests_waiting"] == 2
            response = await server.post(COMPLETIONS, body)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            stream = await server.post(COMPLETIONS, {**body, "stream": True})
            assert stream.status_code == 503
            engine.paused = False
            assert {answer.status_code for answer in await asyncio.gather(*tasks)} == {200}
            metrics = (await server.client.get("/metrics")).text
            (line,) = [
                x for x in metrics.splitlines() if x.startswith("pelton:admission_rejections_total")
            ]
            assert float(line.split()[-1]) == 2
            # Who was turned away is no request of those whose sizes are counted.
            for name in ("params_n", "prompt_tokens", "params_max_tokens", "generation_tokens"):
                (line,) = [x for x in metrics.splitlines() if f"request_{name}_count" in x]
                assert float(line.split()[-1]) == rows + 2, line
            assert (await server.client.get("/load")).json()["server_load"] == 0

    run(main)


def test_names_of_the_model() -> None:
    async def main() -> None:
        async with served(scripted_llm(), served_model_name=["big/one", "two"]) as server:
            models = (await server.client.get("/v1/models")).json()
            assert [card["id"] for card in models["data"]] == ["big/one", "two"]
            for name in ("big/one", "two", None):
                body = {"prompt": "x", "model": name}
                answer = (await server.post(COMPLETIONS, body)).json()
                assert answer["model"] == "big/one"
            for name in ("big/one", "two"):
                response = await server.client.get(f"/v1/models/{name}")
                assert response.json()["id"] == name
            assert (await server.client.get("/v1/models/three")).status_code == 404
            response = await server.post(COMPLETIONS, {"prompt": "x", "model": "three"})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
            assert "there is 'big/one', 'two'." in response.json()["error"]["message"]

    run(main)


def test_what_other_clients_send_and_asks_for_nothing_is_taken() -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
                extra = {"best_of": 1, "temperature": 5, "guided_json": None, "max_tokens": 2}
                if path == COMPLETIONS:
                    extra["suffix"] = ""
                response = await server.post(path, {**prompt, **extra})
                assert response.status_code == 200, response.text
            sent = [m for m in engine_of(server.state.engine).sent if isinstance(m, AddRequest)]
            assert [message.params["temperature"] for message in sent] == [5.0, 5.0]

    run(main)


def test_one_limit_of_answers_whoever_finds_it() -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            for body, words in (
                ({"prompt": "x", "n": 1025}, "n must be between 1 and 1024, got 1025."),
                ({"prompt": ["x", "y"], "n": 513}, "n must be at most 512 for 2 prompts"),
                ({"prompt": ["x"] * 1025}, "prompt may hold 1024 prompts, got 1025."),
            ):
                response = await server.post(COMPLETIONS, {"temperature": 1, **body})
                assert response.status_code == 400
                assert words in response.json()["error"]["message"]

    run(main)


def test_tokens() -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            text = "Hello, wörld 😊"
            body = {"prompt": text, "return_token_strs": True}
            found = (await server.post("/tokenize", body)).json()
            assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
            assert found["max_model_len"] == 2048
            back = (await server.post("/detokenize", {"tokens": found["tokens"]})).json()
            assert back["prompt"] == text
            chat = (await server.post("/tokenize", {"messages": HELLO})).json()
            answer = (await server.post(CHAT, {"messages": HELLO, "max_tokens": 1})).json()
            assert chat["count"] == answer["usage"]["prompt_tokens"]
            for wrong in ({}, {"prompt": "x", "messages": HELLO}):
                assert (await server.post("/tokenize", wrong)).status_code == 400
            for ids in ([10**6], [-1], [2**40]):
                assert (await server.post("/detokenize", {"tokens": ids})).status_code == 400

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_and_answer_must_fit_the_context(stream: bool) -> None:
    """As OpenAI and vLLM have it: what was asked for is refused, and what was not is cut."""

    async def main() -> None:
        async with served(scripted_llm()) as server:
            most = server.state.max_model_len
            ids = [5] * (most - 4)
            for body in ({"prompt": ids}, {"prompt": ids, "max_tokens": 4}):
                assert (await server.post(COMPLETIONS, body)).status_code == 200
            long = {"prompt": [[5], ids], "max_tokens": 5}
            chat = {"messages": HELLO}
            refused: list[tuple[str, dict[str, Any], str]] = [
                (COMPLETIONS, long, "max_tokens"),
                (CHAT, {**chat, "max_tokens": most}, "max_tokens"),
                (CHAT, {**chat, "max_completion_tokens": most}, "max_completion_tokens"),
            ]
            for path, body, name in refused:
                response = await server.post(path, {**body, "stream": stream})
                assert response.status_code == 400
                error = response.json()["error"]
                assert (error["param"], error["code"]) == (name, "context_length_exceeded")
                for words in (f" tokens and {name}={body[name]}", f"max_model_len={most}"):
                    assert words in error["message"]
            kept = {"prompt": [5] * (2 * most), "truncate_prompt_tokens": -1, "max_tokens": 10}
            usage = (await server.post(COMPLETIONS, kept)).json()["usage"]
            assert usage["prompt_tokens"] == most - 10
            echo = {"prompt": [5] * (most - 1), "echo": True, "max_tokens": 0}
            assert (await server.post(COMPLETIONS, echo)).status_code == 200
            text = (await server.client.get("/metrics")).text
            (line,) = [one for one in text.splitlines() if "params_max_tokens_count" in one]
            assert float(line.split()[-1]) == 4

    run(main)


@pytest.mark.parametrize("given", [" ", " a", "a "])
def test_a_request_id_of_a_body_that_no_header_holds(given: str) -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            answer = await server.post(COMPLETIONS, {"prompt": "x", "request_id": given})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "request_id"

    run(main)


def test_a_request_id_cannot_pass_for_more_of_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            for name in ("plain-1", "x) POST /v1/completions: 1 + 1 tokens, stop", "'quoted'"):
                headers = {"x-request-id": name}
                answer = await server.post(COMPLETIONS, {"prompt": "x"}, headers=headers)
                assert answer.headers["x-request-id"] == name
            await server.post(COMPLETIONS, {"prompt": 1}, headers={"x-request-id": "a b"})

    with caplog.at_level(logging.INFO, "pelton.requests"):
        run(main)
    lines = [record.message for record in caplog.records if record.name == "pelton.requests"]
    shown = [line.partition(" ")[2].partition(" POST ")[0] for line in lines]
    assert shown[0] == "(plain-1)"
    assert lines[1].partition(" ")[2].startswith("('x) POST /v1/completions: 1 + 1 tokens, stop') ")
    assert shown[2] == """("'quoted'")"""


def test_served_under_a_prefix(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with served(scripted_llm(), root_path="/llm") as server:
            document = (await server.client.get("/openapi.json")).json()
            assert document["servers"] == [{"url": "/llm"}]
            for before in ("", "/llm"):
                for path in ("/health", "/v1/models", "/", "/web/app.js", "/openapi.json"):
                    assert (await server.client.get(before + path)).status_code == 200, path
                with caplog.at_level(logging.INFO, "pelton.requests"):
                    response = await server.post(before + CHAT, {"messages": HELLO})
                assert response.status_code == 200
                assert f"POST {CHAT}:" in caplog.text
                assert "/llm" not in caplog.text
                caplog.clear()
                for method, path, status, words in [
                    ("GET", "/v1/nothing", 404, "no GET /v1/nothing here"),
                    ("GET", "/llmv1/models", 404, "no GET"),
                    ("GET", CHAT, 405, f"{CHAT} takes POST"),
                ]:
                    response = await server.client.request(method, before + path)
                    assert response.status_code == status
                    assert words in response.json()["error"]["message"]
            # The page's own addresses are relative.
            response = await server.client.get("/llm")
            assert response.is_redirect
            assert response.headers["location"] == "/llm/"

    run(main)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/v1/models", "/health", "/v1/health"])
def test_a_prefix_that_begins_an_endpoints_path(path: str) -> None:
    async def main() -> None:
        async with served(scripted_llm(), root_path="/v1") as server:
            assert (await server.client.get(path)).status_code == 200

    run(main)


def test_a_template_that_never_ends_is_a_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 36: 400 with the template's message, and nobody waits for it."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 1.0)

    async def main() -> None:
        async with served(scripted_llm(), trust_request_chat_template=True) as server:
            forever = (
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
            )
            slow = asyncio.create_task(
                server.post(CHAT, {"messages": HELLO, "chat_template": forever})
            )
            longest = 0.0
            loop = asyncio.get_running_loop()
            while not slow.done():
                began = loop.time()
                assert (await server.client.get("/health")).status_code == 200
                longest = max(longest, loop.time() - began)
                await asyncio.sleep(0.05)
            response = await slow
            assert response.status_code == 400
            assert "ran for more than" in response.json()["error"]["message"]
            assert longest < 1
            for template in (
                "{{ raise_exception('alternate, please') }}",
                "{{ x.y.z }}",
                "{% bad %}",
            ):
                body = {"messages": HELLO, "chat_template": template}
                response = await server.post(CHAT, body)
                assert response.status_code == 400
            own = {
                "messages": HELLO,
                "chat_template": "Say: {{ messages[0].content }}",
                "max_tokens": 1,
            }
            assert (await server.post(CHAT, own)).status_code == 200

    run(main, timeout=60)


def test_openapi_tells_the_truth_about_fields() -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            document = (await server.client.get("/openapi.json")).json()
            chat = document["components"]["schemas"]["ChatBody"]
            assert chat["additionalProperties"] is False
            assert chat["properties"]["tools"]["enum"] == [None, []]
            assert chat["required"] == ["messages"]
            assert httpx.URL("/v1/models/{name}").path in document["paths"]
            assert json.dumps(document)
            names = ["ChatBody", "CompletionBody", "TokenizeBody", "StreamOptions"]
            names += ["EmbeddingBody", "PoolingBody", "ClassifyBody", "ScoreBody", "RerankBody"]
            for name in names:
                for field, schema in document["components"]["schemas"][name]["properties"].items():
                    assert schema.get("description"), f"{name} says nothing of {field}"
            completion = document["components"]["schemas"]["CompletionBody"]["properties"]
            assert "1 = off" in completion["top_p"]["description"]
            assert "16 unless given" in completion["max_tokens"]["description"]

    run(main)


def test_continuing_a_message_with_echo() -> None:
    async def main() -> None:
        async with served(scripted_llm(text_script(" jumps."))) as server:
            body = {
                "messages": [*HELLO, {"role": "assistant", "content": "The fox"}],
                "continue_final_message": True,
                "echo": True,
            }
            whole = (await server.post(CHAT, body)).json()
            assert whole["choices"][0]["message"]["content"] == "The fox jumps."
            refusal = [{"type": "refusal", "refusal": "The fox"}]
            for message in ({"content": refusal}, {"content": None, "refusal": "The fox"}):
                refused = {**body, "messages": [*HELLO, {"role": "assistant", **message}]}
                whole = (await server.post(CHAT, refused)).json()
                assert whole["choices"][0]["message"]["content"] == "The fox jumps."
            events = await server.events(CHAT, body)
            assert (
                "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
                == "The fox jumps."
            )

    run(main)
