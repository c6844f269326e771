"""The benchmark's HTTP client, fed in pieces of any size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.serving import run

from pelton.bench.http_stream import Dechunker, EventReader, HttpClient
from pelton.errors import ConfigError, EngineError

EVENTS = [b'{"a": 1}', b"[DONE]", "é".encode()]
STREAM = b"".join(b"data: " + event + b"\n\n" for event in EVENTS)


def chunked(body: bytes, sizes: list[int]) -> bytes:
    found, place = b"", 0
    for size in [*sizes, len(body)]:
        if piece := body[place : place + size]:
            found += f"{len(piece):x};x=y\r\n".encode() + piece + b"\r\n"
        place += size
    return found + b"0\r\n\r\n"


@given(sizes=st.lists(st.integers(1, 9), max_size=8), cuts=st.lists(st.integers(1, 7), max_size=40))
def test_any_pieces_give_the_same_events(sizes: list[int], cuts: list[int]) -> None:
    wire = chunked(STREAM, sizes)
    decoder, reader, found = Dechunker(), EventReader(), []
    place = 0
    for cut in [*cuts, len(wire)]:
        if place < len(wire):
            assert not decoder.is_done
            found += reader.feed(decoder.feed(wire[place : place + cut]))
        place += cut
    assert decoder.is_done
    assert found == EVENTS


@contextlib.asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[HttpClient, list[int]]]:
    """A server that gives these answers to the requests of a connection, and then closes it. The
    list counts connections."""
    connections: list[int] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        for answer in answers:
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/")
    try:
        yield client, connections
    finally:
        client.close()
        server.close()


async def get(client: HttpClient) -> bytes:
    async with client.request("GET", "/x") as response:
        assert response.status == 200
        return await response.read()


def test_connections_are_kept_and_replaced() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(b"ok", [1])

    async def main() -> None:
        async with answering(whole, stream) as (client, connections):
            assert [await get(client) for _ in range(5)] == [b"ok"] * 5
            assert len(connections) == 3

    run(main)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"", "does not answer"),
        (b"SSH-2.0\r\n\r\n", "no HTTP/1.1 answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok", "broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no chunk size"),
    ],
)
def test_broken_answers(answer: bytes, sentence: str) -> None:
    async def main() -> None:
        async with answering(answer) as (client, _):
            with pytest.raises(EngineError, match=sentence):
                await get(client)

    run(main)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999999", ""])
def test_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="url="):
        HttpClient(url)
