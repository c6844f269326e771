"""OpenAI's API over an engine of this process's own, without HTTP: the server's bodies, checks,
answers and errors."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from pelton.config.engine import EngineArgs
from pelton.config.server import ServerArgs
from pelton.engine.async_llm import AsyncLLM
from pelton.errors import EngineDead
from pelton.server.bodies import Kind, parse_body, too_large
from pelton.server.errors import ApiError, as_api_error
from pelton.server.options import check_server
from pelton.server.pooling import PoolingWatch
from pelton.server.pooling_protocol import (
    ALIASES,
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pelton.server.protocol import ChatBody, CompletionBody
from pelton.server.request_ids import new_id
from pelton.server.serve import make_state
from pelton.server.service import Run, Watch
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes

GENERATING = ("/v1/chat/completions", "/v1/completions")
POOLING = ("/v1/embeddings", "/pooling", "/classify", "/score", "/rerank")
_ALIASED = {alias: path for path, aliases in ALIASES.items() for alias in aliases}
PATHS = (*GENERATING, *POOLING, *_ALIASED)


class LocalApi:
    """What a server with `state` answers to POST."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """HTTP status and body of the answer to `body`, JSON, at one of `PATHS`.

        Raises EngineDead: then no answer to anything will come.
        """
        path = _ALIASED.get(path, path)
        try:
            if path in POOLING:
                return 200, await self._pool(path, body)
            run = await self._begin(path, body, streams=False)
            return 200, json_bytes(await run.whole())
        except EngineDead:
            raise
        except Exception as error:
            failure = _failure(error)
            return failure.status, json_bytes(failure.answer)

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer at one of GENERATING as JSON, and at last a chunk with
        usage. Leaving it ends the request. Raises ApiError or EngineDead."""
        try:
            run = await self._begin(path, body, streams=True)
            async with contextlib.aclosing(run.chunks()) as pieces:
                async for chunks in pieces:
                    for chunk in chunks:
                        yield json_bytes(chunk)
            yield json_bytes(run.usage_chunk())
        except EngineDead:
            raise
        except Exception as error:
            raise _failure(error) from None

    async def _begin(self, path: str, body: bytes, *, streams: bool) -> Run[Any, Any]:
        service = self.state.service
        if path == GENERATING[0]:
            chat = await self._parse(body, ChatBody)
            _check_stream(chat.stream, streams)
            return await service.chat(chat, Watch())
        completion = await self._parse(body, CompletionBody)
        _check_stream(completion.stream, streams)
        return await service.complete(completion, Watch())

    async def _pool(self, path: str, body: bytes) -> bytes:
        pooling, watch = self.state.pooling, PoolingWatch()
        if path == "/v1/embeddings":
            return await pooling.embed(await self._parse(body, EmbeddingBody), watch)
        if path == "/pooling":
            return await pooling.pooled(await self._parse(body, PoolingBody), watch)
        if path == "/classify":
            return await pooling.classify(await self._parse(body, ClassifyBody), watch)
        if path == "/score":
            return await pooling.score(await self._parse(body, ScoreBody), watch)
        return await pooling.rerank(await self._parse(body, RerankBody), watch)

    async def _parse(self, body: bytes, kind: type[Kind]) -> Kind:
        if len(body) > (limit := self.state.args.max_body_bytes):
            raise too_large(limit)
        return await parse_body(self.state.pool, body, kind)


def _check_stream(asked: bool | None, streams: bool) -> None:
    if asked and not streams:
        raise ApiError(400, "stream must be false here: the answer comes whole.", param="stream")


def _failure(error: Exception) -> ApiError:
    return as_api_error(error, new_id())


@contextlib.asynccontextmanager
async def open_local(
    engine_args: EngineArgs,
    args: ServerArgs,
    *,
    on_phase: Callable[[str, float], None] | None = None,
) -> AsyncGenerator[LocalApi, None]:
    """Starts an engine, and ends it on leaving. on_phase: as in `AsyncLLM.start`."""
    check_server(args)
    engine = await AsyncLLM.start(engine_args, on_phase=on_phase)
    try:
        state = make_state(engine, args, chat_template=engine_args.chat_template)
        try:
            yield LocalApi(state)
        finally:
            state.pool.shutdown(wait=False, cancel_futures=True)
    finally:
        await engine.close()
