"""The HTTP server in this process, over any AsyncLLM: real sockets, no engine process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import httpx
import uvicorn

from pelton.config.server import ServerArgs
from pelton.engine.async_llm import AsyncLLM
from pelton.server.app import create_app
from pelton.server.connections import Server, server_of
from pelton.server.serve import make_state
from pelton.server.state import ServerState


class Served:
    """client: of the running server. state: what it serves. server: uvicorn's."""

    def __init__(
        self, client: httpx.AsyncClient, state: ServerState, port: int, server: Server
    ) -> None:
        self.client = client
        self.state = state
        self.port = port
        self.server = server

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def events(self, path: str, body: Any) -> list[Any]:
        """The events of a stream; the last one may be "[DONE]"."""
        found: list[Any] = []
        async with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line:
                    kind, _, data = line.partition(": ")
                    assert kind == "data"
                    found.append(data if data == "[DONE]" else json.loads(data))
        return found


@contextlib.asynccontextmanager
async def served(
    llm: AsyncLLM, *, keys: Sequence[str] = (), **options: Any
) -> AsyncIterator[Served]:
    """options: of ServerArgs."""
    args = ServerArgs(**options)
    state = make_state(llm, args)
    server = server_of(create_app(state, keys), args)
    server.config.port = 0
    server.config.timeout_graceful_shutdown = 1
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.002)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False
        ) as client:
            yield Served(client, state, port, server)
    finally:
        server.should_exit = True
        await task
        state.pool.shutdown()
        await llm.close()


@contextlib.contextmanager
def served_in_thread(make: Callable[[], AsyncLLM], **options: Any) -> Iterator[str]:
    """The URL of a server with an event loop of its own, for tests that have none, or another.
    make: called there."""
    ready, stop = threading.Event(), threading.Event()
    address = []

    async def main() -> None:
        async with served(make(), **options) as server:
            address.append(f"http://127.0.0.1:{server.port}")
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(30)
        yield address[0]
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def run(main: Callable[[], Awaitable[Any]], timeout: float = 30) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(timeout):
            return await main()

    # The kind of event loop that `pelton serve` has.
    loop_factory = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(bounded())
