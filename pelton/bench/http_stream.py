"""A small HTTP/1.1 client for event streams: a benchmark's client must not be what is measured.

Bytes are read as they come and decoded in one pass; connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from pelton.config.reasons import reason_of
from pelton.config.server_url import read_server_url
from pelton.errors import EngineError

_PIECE = 2**16
_MAX_HEAD = 2**16


@dataclass(slots=True)
class Response:
    """status, and the body as it comes, in pieces of whatever size."""

    status: int
    pieces: AsyncGenerator[bytes, None]

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces])


class HttpClient:
    """Requests to one server. url: with or without /v1 at its end.

    Raises ConfigError for what is no URL.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        server = read_server_url(url)
        self._tls = ssl.create_default_context() if server.is_secure else None
        self._host, self._port, self._root = server.host, server.port, server.root
        self._headers = f"Host: {server.authority}\r\n"
        if key:
            self._headers += f"Authorization: Bearer {key}\r\n"
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes = b""
    ) -> AsyncGenerator[Response, None]:
        """Raises EngineError if nobody answers, or not by HTTP. Left early, the connection ends."""
        head = f"{method} {self._root}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        message = head.encode("latin-1") + b"\r\n" + body
        connection, status = await self._send(message)
        try:
            yield Response(status, connection.body())
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _send(self, message: bytes) -> tuple[_Connection, int]:
        """A kept connection may have been closed by now; then a new one is made."""
        while self._idle:
            connection = self._idle.pop()
            with contextlib.suppress(OSError, EOFError):
                return connection, await connection.send(message)
            connection.close()
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            connection = _Connection(reader, writer)
            return connection, await connection.send(message)
        except (OSError, EOFError) as error:
            raise EngineError(
                f"{self._host}:{self._port} does not answer: {reason_of(error)}."
            ) from None

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._rest = b""
        self._headers: dict[bytes, bytes] = {}
        self.is_reusable = False

    async def send(self, message: bytes) -> int:
        """Returns the answer's status. Raises OSError, EOFError, EngineError."""
        self.is_reusable = False
        self._writer.write(message)
        await self._writer.drain()
        head = b""
        while b"\r\n\r\n" not in head:
            if len(head) > _MAX_HEAD:
                raise EngineError("the answer's head is too long.")
            piece = await self._reader.read(_PIECE)
            if not piece:
                raise EOFError("the connection was closed")
            head += piece
        head, _, self._rest = head.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if not words[0].startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise EngineError(f"no HTTP/1.1 answer, but {first[:100]!r}.")
        pairs = (line.partition(b":") for line in lines)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return int(words[1])

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Raises EngineError if it breaks off."""
        keeps = self._headers.get(b"connection", b"").lower() != b"close"
        if b"chunked" in self._headers.get(b"transfer-encoding", b"").lower():
            decoder = Dechunker()
            while not decoder.is_done:
                data = self._rest or await self._read()
                self._rest = b""
                if piece := decoder.feed(data):
                    yield piece
            self.is_reusable = keeps
        elif (length := self._headers.get(b"content-length")) is not None:
            left = int(length)
            while left:
                data = self._rest or await self._read()
                self._rest = b""
                left -= len(data)
                yield data
            self.is_reusable = keeps
        else:
            if self._rest:
                yield self._rest
            while piece := await self._read(may_end=True):
                yield piece

    async def _read(self, *, may_end: bool = False) -> bytes:
        try:
            data = await self._reader.read(_PIECE)
        except OSError as error:
            raise EngineError(f"the answer broke off: {reason_of(error)}.") from None
        if not data and not may_end:
            raise EngineError("the answer broke off.")
        return data

    def close(self) -> None:
        self._writer.close()


class Dechunker:
    """Undoes Transfer-Encoding: chunked (RFC 9112, 7.1), fed in pieces of any size."""

    def __init__(self) -> None:
        self._data = b""
        self._left = 0  # bytes of the present chunk, and its line end
        self.is_done = False

    def feed(self, data: bytes) -> bytes:
        """What `data` adds to the body. Raises EngineError for what is no chunk."""
        data, self._data = self._data + data, b""
        found: list[bytes] = []
        place = 0
        while place < len(data):
            if self._left:
                size = min(self._left, len(data) - place)
                # The last two bytes of a chunk are its line end.
                found.append(data[place : place + min(size, max(self._left - 2, 0))])
                self._left -= size
                place += size
                continue
            end = data.find(b"\r\n", place)
            if end < 0:
                self._data = data[place:]
                break
            word = data[place:end].partition(b";")[0].strip()
            try:
                size = int(word, 16)
            except ValueError:
                raise EngineError(f"the answer has no chunk size, but {word[:50]!r}.") from None
            if size == 0:
                # Trailers are not for us; the empty line after them is the end.
                self.is_done = data.endswith(b"\r\n\r\n")
                if not self.is_done:
                    self._data = data[place:]
                break
            place = end + 2
            self._left = size + 2
        return b"".join(found)


class EventReader:
    """The data of server-sent events, from pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
