"""The HTTP application: which path does what."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from pelton.metrics.prometheus import CONTENT_TYPE
from pelton.server.endpoint import Answer, Call, Endpoint, InFlight
from pelton.server.errors import ApiError, as_api_error
from pelton.server.keys import KeyGuard, open_to_all
from pelton.server.openapi import Operation, openapi_document
from pelton.server.pooling_protocol import (
    ALIASES,
    ClassesList,
    ClassifyBody,
    EmbeddingBody,
    EmbeddingList,
    PooledList,
    PoolingBody,
    Ranking,
    RerankBody,
    ScoreBody,
    ScoreList,
)
from pelton.server.protocol import (
    ChatBody,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionBody,
    DetokenizeBody,
    Health,
    Load,
    ModelCard,
    ModelList,
    Stats,
    Text,
    TokenizeBody,
    Tokens,
    Version,
)
from pelton.server.request_ids import HEADER, Named, id_of
from pelton.server.root_path import UnderPrefix, path_of
from pelton.server.routes import generation, models, page, pooling, status, tokens
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes

_OF_BODY = ("content-length", "content-type")

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        handler=generation.chat_completions,
        body=ChatBody,
        answer=ChatCompletion,
        streams=ChatChunk,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        handler=generation.completions,
        body=CompletionBody,
        answer=Completion,
        streams=Completion,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        handler=pooling.embeddings,
        body=EmbeddingBody,
        answer=EmbeddingList,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="POST",
        path="/pooling",
        aliases=ALIASES["/pooling"],
        handler=pooling.pooling,
        body=PoolingBody,
        answer=PooledList,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="POST",
        path="/classify",
        aliases=ALIASES["/classify"],
        handler=pooling.classify,
        body=ClassifyBody,
        answer=ClassesList,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="POST",
        path="/score",
        aliases=ALIASES["/score"],
        handler=pooling.score,
        body=ScoreBody,
        answer=ScoreList,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="POST",
        path="/rerank",
        aliases=ALIASES["/rerank"],
        handler=pooling.rerank,
        body=RerankBody,
        answer=Ranking,
        needs_key=True,
        is_work=True,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        handler=models.list_models,
        answer=ModelList,
        needs_key=True,
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        handler=models.show_model,
        answer=ModelCard,
        needs_key=True,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        handler=tokens.tokenize,
        body=TokenizeBody,
        answer=Tokens,
        needs_key=True,
    ),
    Operation(
        method="POST",
        path="/detokenize",
        handler=tokens.detokenize,
        body=DetokenizeBody,
        answer=Text,
        needs_key=True,
    ),
    Operation(method="GET", path="/health", handler=status.health, answer=Health),
    Operation(method="GET", path="/version", handler=status.version, answer=Version),
    Operation(method="GET", path="/load", handler=status.load, answer=Load),
    Operation(method="GET", path="/stats", handler=status.stats, answer=Stats),
    Operation(method="GET", path="/metrics", handler=status.metrics, answer=CONTENT_TYPE),
)


def create_app(state: ServerState, keys: Sequence[str] = ()) -> ASGIApp:
    """The application that serves `state`.

    keys: one of which a client needs, except for health, version, load, stats, metrics, the page
        and this description; none: everybody may come in.
    """
    has_key = KeyGuard(keys)

    def guard(request: Request) -> None:
        has_key(request)
        state.check_open()

    routes: list[BaseRoute] = [
        Route(
            # A model's name may hold slashes, as hub ids do.
            path.replace("{name}", "{name:path}"),
            Endpoint(
                functools.partial(operation.handler, state),
                guard=guard if operation.needs_key else open_to_all,
                in_flight=state.in_flight if operation.is_work else InFlight(),
            ),
            methods=[operation.method],
        )
        for operation in OPERATIONS
        for path in (operation.path, *operation.aliases)
    ]
    document = json_bytes(openapi_document(OPERATIONS, root_path=state.args.root_path))

    async def openapi(call: Call) -> Answer:
        return Answer(document)

    described = {"/openapi.json": openapi, **page.handlers()}
    routes += [
        Route(path, Endpoint(handler, guard=open_to_all, in_flight=InFlight()), methods=["GET"])
        for path, handler in described.items()
    ]
    origins = state.args.allowed_origins
    cors = Middleware(
        _Cors,
        allow_origins=origins or [],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[HEADER],
    )
    app = Starlette(
        routes=routes,
        middleware=[cors] if origins else [],
        exception_handlers={HTTPException: _no_such_path},
    )
    return Named(UnderPrefix(app, state.args.root_path, routes))


class _Cors(CORSMiddleware):
    """Refuses in the shape that all errors have."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        what = bytes(answer.body).decode().partition("CORS ")[2] or "request"
        message = (
            f"A page of {request_headers['origin'][:200]} may not call this server: its {what} is "
            "not allowed (--allowed-origins)."
        )
        headers = {k: v for k, v in answer.headers.items() if k not in _OF_BODY}
        return _error(ApiError(answer.status_code, message), headers)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if (refusal := id_of(request.scope).refusal) is not None:
        return _error(as_api_error(refusal, ""), {})
    method, path = request.method[:20], path_of(request.scope)[:200]
    message = f"There is no {method} {path} here; /openapi.json lists what there is."
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{path} takes {allowed}, and not {method}."
    return _error(ApiError(error.status_code, message), dict(error.headers or {}))


def _error(error: ApiError, headers: Mapping[str, str]) -> Response:
    return Response(
        json_bytes(error.answer),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )
