"""One HTTP request from its first byte to its last: names, errors, disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from pelton.server.errors import as_api_error
from pelton.server.request_ids import RequestId, id_of
from pelton.server.streaming import event, json_bytes

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"

_BODY_HEADERS = {"content-length", "transfer-encoding"}
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Call:
    """A request that is being answered."""

    request: Request

    @property
    def id(self) -> RequestId:
        return id_of(self.request.scope)


@dataclass(slots=True)
class Answer:
    """What is answered: `body`, or `events`, each item of which goes out at once."""

    body: bytes = b""
    content_type: str = JSON
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    events: AsyncGenerator[bytes, None] | None = None


Handler = Callable[[Call], Coroutine[Any, Any, Answer]]


@dataclass(slots=True)
class InFlight:
    """now: requests that have come and are not answered."""

    now: int = 0


class Endpoint:
    """An ASGI application around `handler`: it tells exceptions in OpenAI's shape, and cancels the
    handler when the client has left.

    Args:
        guard: raises ApiError for who may not come in.
        in_flight: counts the requests.
    """

    def __init__(
        self, handler: Handler, *, guard: Callable[[Request], None], in_flight: InFlight
    ) -> None:
        self._handler = handler
        self._guard = guard
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._in_flight.now += 1
        try:
            await self._run(scope, receive, send)
        finally:
            self._in_flight.now -= 1

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        body_ended = asyncio.Event()

        async def watched_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                body_ended.set()
            return message

        call = Call(Request(scope, watched_receive))
        answering = asyncio.create_task(self._answer(call, send, body_ended))
        leaving = asyncio.create_task(_disconnect(receive, body_ended))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            # Even if the server is being stopped, what was begun is undone before this returns.
            results = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(error := results[0], Exception):
            raise error

    async def _answer(self, call: Call, send: Send, body_ended: asyncio.Event) -> None:
        has_begun = False
        try:
            call.id.check()
            self._guard(call.request)
            answer = await self._handler(call)
            if answer.events is None:
                await _send(call, send, answer)
                return
            async with contextlib.aclosing(answer.events) as events:
                # What is wrong with the request shows before its first tokens, in the status.
                first = await anext(events)
                has_begun = True
                await send(_start(answer.status, EVENTS, {"cache-control": "no-cache"}))
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except ClientDisconnect:
            pass
        except Exception as error:
            failure = as_api_error(error, call.id.logged)
            if has_begun:
                last = event(failure.answer)
                await send({"type": "http.response.body", "body": last})
                return
            answer = Answer(
                json_bytes(failure.answer), status=failure.status, headers=failure.headers
            )
            has_body = bool(_BODY_HEADERS & {*call.request.headers})
            await _send(call, send, answer, lingers=has_body and not body_ended.is_set())


async def _disconnect(receive: Receive, body_ended: asyncio.Event) -> None:
    """Returns when the client has left. While the body comes, its reader finds that out."""
    await body_ended.wait()
    while (await receive())["type"] != "http.disconnect":
        pass


def _start(status: int, content_type: str, headers: dict[str, str]) -> Message:
    all_headers = {"content-type": content_type, **headers}
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in all_headers.items()],
    }


async def _send(call: Call, send: Send, answer: Answer, *, lingers: bool = False) -> None:
    """lingers: the body has not been read. The connection is closed, lest it come for ever, but not
    at once: a client in the middle of sending would see a broken connection, and not the answer."""
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    if lingers:
        headers["connection"] = "close"
    await send(_start(answer.status, answer.content_type, headers))
    if lingers and "expect" not in call.request.headers:
        await send({"type": "http.response.body", "body": answer.body, "more_body": True})
        await _discard(call.request)
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": answer.body})


async def _discard(request: Request) -> None:
    """Reads what is left of a body, within limits."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while size < _LINGER_BYTES:
                message = await request.receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
