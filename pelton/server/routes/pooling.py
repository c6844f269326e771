"""POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from pelton.server.bodies import parse_body, read_body
from pelton.server.endpoint import Answer, Call
from pelton.server.pooling import PoolingWatch
from pelton.server.pooling_protocol import (
    ClassifyBody,
    EmbeddingBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pelton.server.pooling_watch import LoggedPooling
from pelton.server.root_path import path_of
from pelton.server.state import ServerState

Body = TypeVar("Body", bound=PooledBody)


async def embeddings(state: ServerState, call: Call) -> Answer:
    """A vector for each text."""
    return await _answer(state, call, EmbeddingBody, state.pooling.embed)


async def pooling(state: ServerState, call: Call) -> Answer:
    """What the model makes of each text, or of each of its tokens."""
    return await _answer(state, call, PoolingBody, state.pooling.pooled)


async def classify(state: ServerState, call: Call) -> Answer:
    """The probability of each class for each text."""
    return await _answer(state, call, ClassifyBody, state.pooling.classify)


async def score(state: ServerState, call: Call) -> Answer:
    """How well texts go together."""
    return await _answer(state, call, ScoreBody, state.pooling.score)


async def rerank(state: ServerState, call: Call) -> Answer:
    """Documents by how relevant they are to a query."""
    return await _answer(state, call, RerankBody, state.pooling.rerank)


async def _answer(
    state: ServerState,
    call: Call,
    kind: type[Body],
    ask: Callable[[Body, PoolingWatch], Awaitable[bytes]],
) -> Answer:
    request = call.request
    body = await parse_body(state.pool, await read_body(request, state.args), kind)
    call.id.name_by_field(body.request_id)
    watch = LoggedPooling(
        state.metrics,
        what=f"{request.method} {path_of(request.scope)}",
        shown_id=call.id.given,
        who=body.user,
        logs_line=state.args.log_requests,
        logs_prompts=state.args.log_prompts,
    )
    return Answer(await ask(body, watch))
