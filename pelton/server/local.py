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
from pelton.server.bodies import parse_body
from pelton.server.errors import ApiError, as_api_error
from pelton.server.options import check_server
from pelton.server.protocol import ChatBody, CompletionBody
from pelton.server.request_ids import new_id
from pelton.server.serve import make_state
from pelton.server.service import Run, Watch
from pelton.server.state import ServerState
from pelton.server.streaming import json_bytes

PATHS = ("/v1/chat/completions", "/v1/completions")


class LocalApi:
    """What a server with `state` answers to POST."""

    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """HTTP status and body of the answer to `body`, JSON, at one of `PATHS`.

        Raises EngineDead: then no answer to anything will come.
        """
        try:
            run = await self._begin(path, body, streams=False)
            return 200, json_bytes(await run.whole())
        except EngineDead:
            raise
        except Exception as error:
            failure = _failure(error)
            return failure.status, json_bytes(failure.answer)

    async def events(self, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The chunks of a streamed answer as JSON, and at last a chunk with usage. Leaving it ends
        the request. Raises ApiError or EngineDead."""
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
        service, pool = self.state.service, self.state.pool
        if len(body) > (limit := self.state.args.max_body_bytes):
            raise ApiError(413, f"The body may have {limit} bytes (--max-body-bytes).")
        if path == PATHS[0]:
            chat = await parse_body(pool, body, ChatBody)
            _check_stream(chat.stream, streams)
            return await service.chat(chat, Watch())
        completion = await parse_body(pool, body, CompletionBody)
        _check_stream(completion.stream, streams)
        return await service.complete(completion, Watch())


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
