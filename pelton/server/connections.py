"""Connections: what uvicorn leaves open. Time limits, what cannot be read as HTTP, and stopping.

A connection is swept for what its client does not do:

    waiting for a request   keep_alive_timeout from the last answer (uvicorn's own)
    request line, headers   head_timeout from the first byte, or from the start of the connection
    body                    body_timeout, see bodies.py
    answer                  send_timeout without a byte that leaves
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import re
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from http import HTTPStatus
from termios import TIOCOUTQ
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from pelton.config.server import ServerArgs
from pelton.server.bodies import too_large
from pelton.server.errors import ApiError
from pelton.server.request_ids import HEADER, RequestId, id_of
from pelton.server.streaming import json_bytes
from pelton.server.tls import server_context

log = logging.getLogger("pelton.server")

MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers."""

_LINGER_SECONDS = 2.0
"""In which a client may read why it was refused, before its connection breaks under what it still
sends."""
_SWEEP_SECONDS = 1.0
_BYTEARRAY = re.compile(r"\bbytearray\((b(['\"])(?:\\.|(?!\2).)*\2)\)")
_BYTES = re.compile(r"\bb((['\"])(?:\\.|(?!\2).)*\2)")
_ABSOLUTE_FORM = re.compile(rb"https?://([^/?#@\s]+)([/?][^#]*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """head, send: seconds, see above. body: bytes."""

    head: float
    send: float
    body: int

    @property
    def sweep(self) -> float:
        """Between two sweeps."""
        return min(_SWEEP_SECONDS, self.head / 4, self.send / 4)


class _Refused(h11.RemoteProtocolError):
    """A head that could be read, and is not taken; its words are a whole sentence."""


class _Parser(h11.Connection):
    """Stricter than h11 about what another server on the way might read otherwise, and so see other
    requests in the same bytes (RFC 9112, 11.2); and about chunks that say they are too large."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_body_bytes = 0
            _check_head(event)
            return _in_origin_form(event)
        if isinstance(event, h11.Data):
            self._num_body_bytes += len(event.data)
        # What a chunk's header has announced and not sent, which h11 tells nobody.
        announced = getattr(self._reader, "_bytes_in_chunk", 0)
        if announced and self._num_body_bytes + announced > self._max_body_bytes:
            raise _Refused(too_large(self._max_body_bytes).message, error_status_hint=413)
        return event


def _check_head(head: h11.Request) -> None:
    version, names = head.http_version, {name for name, _ in head.headers}
    if version not in (b"1.0", b"1.1"):
        raise _Refused(
            f"HTTP/1.1 and HTTP/1.0 are spoken here, got HTTP/{version.decode()}.",
            error_status_hint=505,
        )
    if b"transfer-encoding" not in names:
        return
    if b"content-length" in names:
        raise _Refused("A request may have Content-Length or Transfer-Encoding, and not both.")
    if version == b"1.0":
        raise _Refused("Transfer-Encoding needs HTTP/1.1, got HTTP/1.0.")


def _in_origin_form(head: h11.Request) -> h11.Request:
    """A target may be a whole URL, which then goes before Host (RFC 9112, 3.2.2)."""
    found = _ABSOLUTE_FORM.fullmatch(head.target)
    if found is None:
        return head
    host, rest = found[1], found[2] or b""
    if not rest.startswith(b"/"):
        # A server as a whole: the path is left out.
        rest = b"*" if head.method == b"OPTIONS" and not rest else b"/" + rest
    others = [(name, value) for name, value in head.headers if name != b"host"]
    return h11.Request(
        method=head.method,
        target=rest,
        headers=[(b"host", host), *others],
        http_version=head.http_version,
    )


class Connection(H11Protocol):
    """One client's."""

    def __init__(self, *arguments: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = _Parser(limits.body)
        self._limits = limits
        self._head_began: float | None = None
        self._has_sent = False
        """Something, since a request was last expected."""
        self._is_refused = False
        self._num_unsent = 0
        self._stuck_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_began = time.monotonic()

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_began, self._has_sent = None, False
            return
        # The rest of a body that nobody reads counts, too: it must not keep the connection.
        self._has_sent = True
        if self._head_began is None:
            self._head_began = time.monotonic()

    def sweep(self, now: float) -> None:
        """Is called again and again."""
        unsent = self._count_unsent()
        if unsent == 0 or unsent != self._num_unsent:
            self._num_unsent, self._stuck_since = unsent, now
        elif now - self._stuck_since > self._limits.send:
            self.transport.abort()
            return
        if self._head_began is None or self.transport.is_closing():
            return
        elapsed = now - self._head_began
        if self._is_refused:
            if elapsed > _LINGER_SECONDS:
                self.transport.close()
        elif elapsed > self._limits.head:
            if self._has_sent and self.conn.our_state is h11.IDLE:
                self._refuse(
                    408,
                    f"The request's first line and headers did not arrive within "
                    f"{self._limits.head:g} s (--head-timeout).",
                )
            else:
                self.transport.close()

    def _count_unsent(self) -> int:
        """Bytes that wait, with those that the system has taken and the client has not: it makes
        room for more only when a third of its megabytes is gone."""
        unsent = self.transport.get_write_buffer_size()
        if unsent and sys.platform == "linux":
            taken = bytearray(4)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), TIOCOUTQ, taken)
            unsent += int.from_bytes(taken, sys.byteorder)
        return unsent

    def send_400_response(self, msg: str) -> None:
        """Called where uvicorn handles h11's exception, which knows more than `msg`."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            what = f"The request's first line and headers may have {MAX_HEAD_BYTES} bytes."
        elif isinstance(error, _Refused):
            what = str(error)
        elif status == 501:
            what = f"{_plain(error)}."
        else:
            what = f"This is no HTTP/1.1 request: {_plain(error or msg)}."
        self._refuse(status, what)

    def _refuse(self, status: int, message: str) -> None:
        """Answers, and ends the connection."""
        request_id = RequestId()
        if self.cycle is not None:
            if not self.cycle.response_complete:
                request_id = id_of(cast(Scope, self.scope))
            # Whoever works on a request whose body cannot be read learns that it has left.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = json_bytes(ApiError(status, message).answer)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            (HEADER.lower(), request_id.shown),
        ]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused, self._head_began = True, time.monotonic()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _unsupported_upgrade_warning(self) -> None:
        """An upgrade is an offer; the request is answered as it stands."""


def _plain(words: object) -> str:
    """h11's words, in which bytes stand as Python writes them."""
    return _BYTES.sub(r"\1", _BYTEARRAY.sub(r"\1", str(words)))


class Server(uvicorn.Server):
    """Sweeps its connections, stops when asked, and leaves signals alone.

    Make one with `server_of`.
    """

    def __init__(self, config: uvicorn.Config, limits: Limits) -> None:
        super().__init__(config)
        self._limits = limits

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        sweeping = asyncio.create_task(self._sweep())
        try:
            await super().serve(sockets)
        finally:
            sweeping.cancel()

    async def drain(self) -> None:
        """Returns when the requests of this moment are answered. Others still come in."""
        if running := set(self.server_state.tasks):
            await asyncio.wait(running)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._limits.sweep)
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                try:
                    connection.sweep(now)
                except Exception:
                    log.exception("A connection could not be swept")
                    connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def server_of(app: ASGIApp, args: ServerArgs) -> Server:
    """Serves `app` as `args` say, but for where it listens."""
    limits = Limits(head=args.head_timeout, send=args.send_timeout, body=args.max_body_bytes)
    protocol: Any = functools.partial(Connection, limits=limits)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        # The other parser that uvicorn knows takes headers without an end, in quadratic time.
        http=protocol,
        lifespan="off",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=args.keep_alive_timeout,
    )
    config.load()
    config.ssl = server_context(args)
    return Server(config, limits)
