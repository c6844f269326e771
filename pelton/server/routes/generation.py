"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec

from pelton.server.bodies import parse_body, read_body
from pelton.server.endpoint import EVENTS, Answer, Call
from pelton.server.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from pelton.server.root_path import path_of
from pelton.server.service import Run
from pelton.server.state import ServerState
from pelton.server.streaming import DONE, event, json_bytes
from pelton.server.watch import RequestWatch

Body = TypeVar("Body", bound=GenerationBody)
Chunk = TypeVar("Chunk", bound=msgspec.Struct)
Whole = TypeVar("Whole", bound=msgspec.Struct)


async def completions(state: ServerState, call: Call) -> Answer:
    """Continue a prompt, or each of several."""
    body, watch = await _begin(state, call, CompletionBody)
    return await _answer(body, await state.service.complete(body, watch))


async def chat_completions(state: ServerState, call: Call) -> Answer:
    """Answer a conversation."""
    body, watch = await _begin(state, call, ChatBody)
    return await _answer(body, await state.service.chat(body, watch))


async def _begin(state: ServerState, call: Call, kind: type[Body]) -> tuple[Body, RequestWatch]:
    request = call.request
    raw = await read_body(request, state.args)
    body = await parse_body(state.pool, raw, kind)
    call.id.name_by_field(body.request_id)
    watch = RequestWatch(
        state.metrics,
        what=f"{request.method} {path_of(request.scope)}",
        shown_id=call.id.given,
        who=body.user or body.safety_identifier,
        logs_line=state.args.log_requests,
        logs_prompts=state.args.log_prompts,
    )
    return body, watch


async def _answer(body: GenerationBody, run: Run[Chunk, Whole]) -> Answer:
    if not body.stream:
        return Answer(json_bytes(await run.whole()))
    options = body.stream_options
    shows_usage = options is not None and bool(options.include_usage)
    return Answer(content_type=EVENTS, events=_events(run, shows_usage))


async def _events(run: Run[Chunk, Whole], shows_usage: bool) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(run.chunks()) as pieces:
        async for chunks in pieces:
            yield event(chunks[0]) if len(chunks) == 1 else b"".join(map(event, chunks))
    if shows_usage:
        yield event(run.usage_chunk())
    yield DONE
