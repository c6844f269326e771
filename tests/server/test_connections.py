"""What clients do to a connection, by bytes; over a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import make_certificate
from support.scripted_engine import echo_script, engine_of, scripted_llm, text_script
from support.serving import Served, run, served

from pelton.engine.async_llm import AsyncLLM
from pelton.messages.to_engine import Abort, AddRequest
from pelton.server.connections import Connection
from pelton.server.listen import raise_file_limit

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "la la", "max_tokens": 3}'

BOTH_LENGTHS = (
    POST
    + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % (len(HEALTH) + 5)
    + b"0\r\n\r\n"
    + HEALTH
)
"""One request, or two, as one reads it."""

Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(server: Served) -> AsyncIterator[Pipe]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def alone(llm: AsyncLLM, **options: Any) -> AsyncIterator[Pipe]:
    """The one connection of a server."""
    async with served(llm, **options) as server, connected(server) as pipe:
        yield pipe


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer; no chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.rstrip().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body = await reader.read()
    return int(first.split()[1]), headers, body


async def trickle(writer: asyncio.StreamWriter, data: bytes = b"x") -> None:
    """A byte now and then, for ever."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.02)


async def is_cut(reader: asyncio.StreamReader, seconds: float = 3) -> bytes:
    """What comes before the connection ends."""
    async with asyncio.timeout(seconds):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


def test_a_request_that_never_begins_is_cut_off() -> None:
    async def main() -> None:
        async with alone(scripted_llm(), head_timeout=0.2) as (reader, _):
            assert await is_cut(reader) == b""

    run(main)


def test_a_fault_with_one_connection_leaves_the_others_their_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with served(scripted_llm(), head_timeout=0.2) as server:
            monkeypatch.setattr(Connection, "_refuse", None)
            for _ in range(2):
                async with connected(server) as (reader, writer):
                    writer.write(b"GET")
                    assert await is_cut(reader) == b""

    run(main)


@pytest.mark.parametrize("before", [b"", HEALTH])
def test_a_head_that_trickles_is_cut_off(before: bytes) -> None:
    """At the start of a connection and after a request; told why, in the usual shape."""

    async def main() -> None:
        async with served(scripted_llm(), head_timeout=0.3) as server:
            async with connected(server) as (reader, writer):
                if before:
                    writer.write(before)
                    assert (await answer(reader))[0] == 200
                writer.write(b"GET /health HTTP/1.1\r\nX: ")
                trickling = asyncio.create_task(trickle(writer))
                async with asyncio.timeout(3):
                    status, headers, body = await answer(reader)
                assert status == 408
                assert headers["connection"] == "close"
                assert "head-timeout" in json.loads(body)["error"]["message"]
                await is_cut(reader)
                trickling.cancel()
            assert (await server.client.get("/health")).status_code == 200

    run(main)


def test_a_body_that_nobody_reads_may_not_trickle() -> None:
    async def main() -> None:
        async with alone(scripted_llm(), head_timeout=0.3) as (reader, writer):
            writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n")
            assert (await answer(reader))[0] == 404
            trickling = asyncio.create_task(trickle(writer))
            await is_cut(reader)
            trickling.cancel()

    run(main)


def test_a_body_that_trickles_is_cut_off() -> None:
    async def main() -> None:
        async with alone(scripted_llm(), body_timeout=0.3) as (reader, writer):
            writer.write(POST + b"Content-Length: 9999\r\n\r\n")
            trickling = asyncio.create_task(trickle(writer, b" "))
            async with asyncio.timeout(3):
                status, _, body = await answer(reader)
            assert status == 408
            assert "body-timeout" in json.loads(body)["error"]["message"]
            trickling.cancel()

    run(main)


def test_limits_do_not_hurt_the_slow_but_steady() -> None:
    """Each request on a connection has its own time, and the answer's does not count."""

    async def main() -> None:
        async with alone(scripted_llm(echo_script, delay=0.05), head_timeout=0.2) as (
            reader,
            writer,
        ):
            for _ in range(2):
                body = b'{"prompt": "la la", "max_tokens": 8}'
                head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
                writer.write(head[:50])
                await asyncio.sleep(0.08)
                writer.write(head[50:] + body)
                assert (await answer(reader))[0] == 200
                await asyncio.sleep(0.25)

    run(main)


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)), 400, "no HTTP/1.1"),
        (b"HELO there\r\n\r\n", 400, "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400, "illegal header line"),
        (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, "Content-Length"),
        (POST + b"Content-Length: 5, 6\r\n\r\n", 400, "Content-Length"),
        (POST + b"Content-Length: -5\r\n\r\n", 400, "Content-Length"),
        (BOTH_LENGTHS, 400, "Content-Length or Transfer-Encoding, and not both."),
        (
            POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "Transfer-Encoding needs HTTP/1.1",
        ),
        (
            HEALTH.replace(b"1.1", b"2.0"),
            505,
            "HTTP/1.1 and HTTP/1.0 are spoken here, got HTTP/2.0.",
        ),
        (HEALTH.replace(b"1.1", b"1.2"), 505, "got HTTP/1.2."),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "got HTTP/2.0."),
        (
            POST + b"Transfer-Encoding: gzip\r\n\r\n",
            501,
            "Only Transfer-Encoding: chunked is supported.",
        ),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, r"chunk header: 'zz\r\n'."),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}XX", 400, "chunk"),
        (b"GET /" + b"a" * 70_000, 431, "65536"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000, 431, "65536"),
    ],
)
def test_what_is_no_http_is_told_so(
    sent: bytes, status: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with served(scripted_llm()) as server:
            async with connected(server) as (reader, writer):
                writer.write(sent)
                async with asyncio.timeout(5):
                    found, headers, body = await answer(reader)
                    assert await reader.read() == b""
                assert found == status
                assert headers["content-type"] == "application/json"
                assert headers["connection"] == "close"
                assert headers["x-request-id"].startswith("req-")
                error = json.loads(body)["error"]
                assert words.lower() in error["message"].lower()
                assert not re.search(r"bytearray|\bb['\"]", error["message"])
                assert error["type"] == "invalid_request_error"
            assert (await server.client.get("/health")).status_code == 200

    run(main)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_goes_wrong_after_its_answer_has_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with alone(scripted_llm(), max_body_bytes=10) as (reader, writer):
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n14\r\n" + b" " * 20 + b"\r\n")
            assert b" 413 " in await reader.readline()
            writer.write(b"zz\r\n")
            await is_cut(reader, 1)

    run(main)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("chunks", "status"),
    [(b"B\r\n", 413), (b"4\r\n    \r\n7\r\n", 413), (b"FFFFFFFFFFFF\r\nx", 413), (b"A\r\n", None)],
)
def test_a_chunk_that_says_it_is_too_large_is_not_waited_for(
    chunks: bytes, status: int | None
) -> None:
    async def main() -> None:
        async with alone(scripted_llm(), max_body_bytes=10) as (reader, writer):
            writer.write(
                POST + b"X-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
            )
            if status is None:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await answer(reader)
                return
            found, headers, body = await answer(reader)
            assert (found, headers["x-request-id"]) == (status, "mine")
            assert b"The body may have 10 bytes (--max-body-bytes)." in body
            await is_cut(reader)

    run(main)


def test_requests_in_turn_count_their_own_bodies() -> None:
    async def main() -> None:
        async with alone(scripted_llm(), max_body_bytes=len(BODY) + 5) as (reader, writer):
            for _ in range(3):
                size = f"{len(BODY):x}".encode()
                head = (
                    POST + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                writer.write(head + size + b"\r\n" + BODY + b"\r\n0\r\n\r\n")
                assert (await answer(reader))[0] == 200

    run(main)


def test_a_body_that_goes_wrong_is_refused_under_its_requests_name() -> None:
    async def main() -> None:
        async with alone(scripted_llm()) as (reader, writer):
            writer.write(POST + b"X-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n\r\n")
            await asyncio.sleep(0.05)
            writer.write(b"zz\r\n")
            status, headers, _ = await answer(reader)
            assert (status, headers["x-request-id"]) == (400, "mine")

    run(main)


def test_a_large_head_finds_its_answer() -> None:
    """Though its client goes on sending: no broken line before the answer is read."""

    async def main() -> None:
        async with served(scripted_llm()) as server, connected(server) as (reader, writer):
            writer.write(b"GET / HTTP/1.1\r\n")
            for _ in range(100):
                writer.write(b"X: " + b"a" * 10_000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
            assert (await answer(reader))[0] == 431

    run(main)


def test_http_1_0() -> None:
    """No chunks, and the end of the answer is the end of the connection."""

    async def main() -> None:
        async with alone(scripted_llm(text_script("Hi there."))) as (reader, writer):
            body = b'{"prompt": "x", "stream": true}'
            writer.write(POST.replace(b"1.1", b"1.0"))
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
            status, headers, events = await answer(reader)
            assert status == 200
            assert "transfer-encoding" not in headers
            assert events.startswith(b"data: {")
            assert events.endswith(b"data: [DONE]\n\n")

    run(main)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET http://any.example/health HTTP/1.1", 200),
        (b"GET HTTP://any.example:80/health?x=1 HTTP/1.1", 200),
        (b"GET https://any.example HTTP/1.1", 200),
        (b"GET http://any.example?x HTTP/1.1", 200),
        (b"GET http://any.example/nothing HTTP/1.1", 404),
        (b"GET ftp://any.example/health HTTP/1.1", 404),
        (b"GET http://me@any.example/health HTTP/1.1", 404),
        (b"GET http:///health HTTP/1.1", 404),
        (b"OPTIONS http://any.example HTTP/1.1", 404),
    ],
)
def test_a_whole_url_as_the_target(line: bytes, status: int) -> None:
    """RFC 9112, 3.2.2: clients of proxies send it, and servers must take it."""

    async def main() -> None:
        async with served(scripted_llm()) as server, connected(server) as (reader, writer):
            for _ in range(2):
                writer.write(line + b"\r\nHost: other\r\n\r\n")
                assert (await answer(reader))[0] == status

    run(main)


def test_a_redirect_names_no_host() -> None:
    """Neither the URL's nor the header's: a proxy may have set either."""

    async def main() -> None:
        async with (
            served(scripted_llm(), root_path="/llm") as server,
            connected(server) as (reader, writer),
        ):
            writer.write(b"GET http://any.example/llm HTTP/1.1\r\nHost: other\r\n\r\n")
            status, headers, _ = await answer(reader)
            assert status == 307
            assert headers["location"] == "/llm/"

    run(main)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main() -> None:
        async with alone(scripted_llm(echo_script)) as (reader, writer):
            one = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
            writer.write((one + HEALTH) * 20 + b"rubbish\r\n\r\n")
            for _ in range(20):
                status, _, body = await answer(reader)
                assert status == 200
                assert json.loads(body)["usage"]["completion_tokens"] == 3
                assert (await answer(reader))[0] == 200
            assert (await answer(reader))[0] == 400
            assert await reader.read() == b""

    run(main)


def test_chunks_with_extensions_and_trailers() -> None:
    async def main() -> None:
        async with alone(scripted_llm(echo_script)) as (reader, writer):
            for _ in range(2):
                writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
                writer.write(b"".join(b"1;a=b\r\n%c\r\n" % byte for byte in BODY))
                writer.write(b"0\r\nX-Trailer: 1\r\nContent-Length: 7\r\n\r\n")
                assert (await answer(reader))[0] == 200
            # Trailers are heads, too.
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
            writer.write(b"X: y\r\n" * 20_000)
            assert (await answer(reader))[0] == 431

    run(main)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_an_upgrade_is_not_taken(protocol: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """RFC 9110, 7.8: a server may ignore it. What follows is HTTP/1.1, or refused."""

    async def main() -> None:
        async with served(scripted_llm()) as server, connected(server) as (reader, writer):
            writer.write(
                b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: "
                + protocol
                + b"\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
            )
            assert (await answer(reader))[0] == 200
            writer.write(b"\x81\x85\x00\x00\x00\x00Hello\r\n\r\n")
            assert (await answer(reader))[0] == 400

    run(main)
    assert not [r for r in caplog.records if "Invalid" not in r.message]


def test_a_client_that_asks_before_it_sends() -> None:
    async def main() -> None:
        async with alone(scripted_llm(echo_script)) as (reader, writer):
            writer.write(POST + b"Content-Length: %d\r\n" % len(BODY))
            writer.write(b"Expect: 100-continue\r\n\r\n")
            assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
            writer.write(BODY)
            assert (await answer(reader))[0] == 200

    run(main)


def test_a_client_that_never_reads_is_cut_off() -> None:
    """One that reads slowly gets its answer, though that takes as long."""

    async def main() -> None:
        async with served(scripted_llm(echo_script, step_size=50), send_timeout=1.0) as server:
            body = {"prompt": "la la", "max_tokens": 1500, "logprobs": 5, "stream": True, "n": 6}
            raw = json.dumps({**body, "temperature": 1}).encode()
            found = server.server.server_state.connections

            async def ask() -> tuple[socket.socket, Any]:
                before, one = set(found), socket.socket()
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
                one.connect(("127.0.0.1", server.port))
                while found == before:
                    await asyncio.sleep(0.01)
                (connection,) = found - before
                # Else the system would take the whole answer.
                its = connection.transport.get_extra_info("socket")
                its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
                one.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
                one.setblocking(False)
                return one, connection

            never, its = await ask()
            slow, _ = await ask()
            got, loop = b"", asyncio.get_running_loop()
            async with asyncio.timeout(20):
                while its in found:
                    got += await loop.sock_recv(slow, 2**14)
                    await asyncio.sleep(0.05)
                assert b"[DONE]" not in got, "the slow one was not slow enough for this test"
                while not got.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                    piece = await loop.sock_recv(slow, 2**16)
                    assert piece
                    got += piece
            never.close()
            slow.close()

    run(main)


def test_a_thousand_connections() -> None:
    """Most of them without a word; those that ask are answered."""

    async def main() -> None:
        raise_file_limit()
        async with served(scripted_llm(echo_script), head_timeout=5) as server:
            pipes: list[Pipe] = []
            for _ in range(10):
                new = (asyncio.open_connection("127.0.0.1", server.port) for _ in range(100))
                pipes += await asyncio.gather(*new)
            asking = pipes[::10]
            for _, writer in asking:
                writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
            statuses = [(await answer(reader))[0] for reader, _ in asking]
            assert set(statuses) == {200}
            assert (await server.client.get("/health")).status_code == 200
            for _, writer in pipes:
                writer.close()

    run(main)


def test_all_this_holds_with_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        certificate, key = make_certificate(tmp_path)
        trust = ssl.create_default_context(cafile=certificate)
        options: dict[str, Any] = {"ssl_certfile": certificate, "ssl_keyfile": key}
        async with served(scripted_llm(), head_timeout=0.5, **options) as server:

            async def connect() -> Pipe:
                return await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=trust, server_hostname="localhost"
                )

            reader, writer = await connect()
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200
            writer.write(b"rubbish\r\n\r\n")
            assert (await answer(reader))[0] == 400
            await is_cut(reader)
            writer.close()
            reader, writer = await connect()
            trickling = asyncio.create_task(trickle(writer))
            async with asyncio.timeout(3):
                assert (await answer(reader))[0] == 408
            await is_cut(reader)
            trickling.cancel()
            writer.close()
            async with connected(server) as (reader, writer):  # without TLS
                writer.write(HEALTH)
                assert b"HTTP" not in await is_cut(reader)

    run(main)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_content_codings_are_refused() -> None:
    async def main() -> None:
        async with served(scripted_llm(echo_script)) as server:
            for coding, status in [("identity", 200), ("gzip", 415), ("identity, br", 415)]:
                headers = {"content-type": "application/json", "content-encoding": coding}
                response = await server.client.post(
                    "/v1/completions", content=BODY, headers=headers
                )
                assert response.status_code == status
                if status == 415:
                    assert coding in response.json()["error"]["message"]
                    assert response.headers["accept-encoding"] == "identity"

    run(main)


def test_garbage_of_all_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """Random bytes, and requests with bytes changed, cut or doubled: an answer or an end, no fault
    of ours, and others are served."""
    random.seed(5)
    whole = POST + b"Transfer-Encoding: chunked\r\n\r\n24\r\n" + BODY + b"\r\n0\r\n\r\n" + HEALTH

    limits: dict[str, Any] = {"head_timeout": 0.4, "body_timeout": 0.4, "keep_alive_timeout": 1}

    def garbled() -> bytes:
        data = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            place = random.randrange(len(data))
            kind = random.randrange(3)
            if kind == 0:
                data[place] = random.choice(b"\x00\r\n :\xff0;{")
            elif kind == 1:
                del data[place : place + random.randint(1, 30)]
            else:
                data[place:place] = data[place : place + random.randint(1, 30)]
        return bytes(data)

    async def main() -> None:
        async with served(scripted_llm(echo_script), **limits) as server:

            async def try_one(data: bytes) -> None:
                async with connected(server) as (reader, writer):
                    half = random.randrange(len(data) + 1)
                    writer.write(data[:half])
                    await asyncio.sleep(0)
                    writer.write(data[half:])
                    if random.random() < 0.3:
                        writer.close()
                        return
                    found = await is_cut(reader, 10)
                    assert b" 500 " not in found

            tries = [garbled() for _ in range(150)]
            tries += [random.randbytes(random.randint(1, 3000)) for _ in range(50)]
            await asyncio.gather(*(try_one(data) for data in tries if data))
            assert (await server.client.get("/health")).status_code == 200
            async with asyncio.timeout(5):
                while server.state.in_flight.now or server.server.server_state.connections:
                    await asyncio.sleep(0.01)
            engine = engine_of(server.state.engine)
            assert sum(isinstance(message, (AddRequest, Abort)) for message in engine.sent) > 0

    run(main)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
