"""A server of another make that speaks OpenAI's API, with the habits that such servers have: it
shares no code with ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class OtherServer:
    """tokens: texts of an answer's tokens. per_event: how many of them an event has. piece: bytes
    that are sent at a time. usage: where it tells how many tokens there were: "each" event, "last"
    (with the last text), "end" (an event of its own), "never". line_end: of its lines. says_done:
    whether [DONE] comes. key: that it wants. streams: false: whatever is asked for, one object.
    bodies: what it was asked."""

    tokens: list[str]
    per_event: int = 1
    piece: int = 7
    usage: str = "never"
    line_end: str = "\n"
    says_done: bool = True
    key: str | None = None
    streams: bool = True
    knows_stream_options: bool = True
    is_loading: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/{rest:path}", self._page),
            ]
        )

    async def _models(self, request: Request) -> Response:
        if self.is_loading:
            error = {"message": "Loading model", "code": 503}
            return JSONResponse({"error": error}, status_code=503)
        return JSONResponse({"object": "list", "data": [{"id": "other", "object": "model"}]})

    async def _page(self, request: Request) -> Response:
        return HTMLResponse("<!doctype html><title>A page for every path</title>")

    async def _answer(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "Wrong key."}}, status_code=401)
        body = await request.json()
        self.bodies.append(body)
        if "stream_options" in body and not self.knows_stream_options:
            return JSONResponse({"error": "Unknown field: stream_options"}, status_code=422)
        is_chat = request.url.path.endswith("chat/completions")
        if not self.streams:
            return JSONResponse({"choices": [{"text": "".join(self.tokens)}]})
        raw = b"".join(self._events(is_chat))
        return StreamingResponse(self._pieces(raw), media_type="text/event-stream")

    def _events(self, is_chat: bool) -> Iterator[bytes]:
        end = self.line_end
        yield f": a comment{end}{end}event: message{end}".encode()
        if is_chat:
            yield self._event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
        count = 0
        for place in range(0, len(self.tokens), self.per_event):
            part = self.tokens[place : place + self.per_event]
            count += len(part)
            is_last = count == len(self.tokens)
            text = "".join(part)
            shown = {"delta": {"content": text}} if is_chat else {"text": text}
            choice = {"index": 0, **shown, "finish_reason": "length" if is_last else None}
            event: dict[str, Any] = {"choices": [choice], "timings": {}}
            if self.usage == "each" or (self.usage == "last" and is_last):
                event["usage"] = self._used(count)
            yield self._event(event)
        if self.usage == "end":
            yield self._event({"choices": [], "usage": self._used(count)})
        if self.says_done:
            yield f"data:[DONE]{end}{end}".encode()

    def _used(self, count: int) -> dict[str, int]:
        return {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}

    def _event(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False)
        return f"data:{text}{self.line_end}{self.line_end}".encode()

    async def _pieces(self, raw: bytes) -> AsyncIterator[bytes]:
        for place in range(0, len(raw), self.piece):
            yield raw[place : place + self.piece]
            await asyncio.sleep(0)


@contextlib.contextmanager
def running(server: OtherServer, **tls: str) -> Iterator[str]:
    """Its URL. tls: ssl_certfile and ssl_keyfile."""
    config = uvicorn.Config(server.app(), port=0, log_config=None, lifespan="off", ws="none", **tls)
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        while not runner.started:
            assert thread.is_alive()
            thread.join(0.002)
        port = runner.servers[0].sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://localhost:{port}"
    finally:
        runner.should_exit = True
        thread.join(30)
