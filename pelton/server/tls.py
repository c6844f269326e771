"""TLS, in which a client that is refused is told why.

asyncio drops a connection whose handshake fails, and with it the alert that OpenSSL has written for
the client: that a certificate is needed, or that the one it sent is unknown or has expired.
"""

from __future__ import annotations

import logging
import ssl
from typing import Any

from pelton.config.server import ServerArgs

log = logging.getLogger("pelton.server")


class _Handshake(ssl.SSLObject):
    """A server's side of one connection. When its handshake has failed and there is an alert, it
    asks for more input, and asyncio sends what is to be sent before it waits for that: until the
    client leaves, or the time for a handshake is over."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    has_failed = False

    def do_handshake(self) -> None:
        if not self.has_failed:
            try:
                super().do_handshake()
                return
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                log.info("A TLS handshake failed: %s.", _reason(error))
                if not self.outgoing.pending:
                    raise
                self.has_failed = True
        self.incoming.read()  # lest what the client still sends be kept
        raise ssl.SSLWantReadError


def _reason(error: ssl.SSLError) -> str:
    verify = getattr(error, "verify_message", None)
    if verify:
        return f"the client's certificate is refused: {verify}"
    return str(error.reason or error).replace("_", " ").lower()


class _Context(ssl.SSLContext):
    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *arguments: Any, **named: Any
    ) -> ssl.SSLObject:
        found = super().wrap_bio(incoming, outgoing, *arguments, **named)
        assert isinstance(found, _Handshake)
        found.incoming, found.outgoing = incoming, outgoing
        return found


_Context.sslobject_class = _Handshake


def server_context(args: ServerArgs) -> ssl.SSLContext | None:
    """What `args` say of TLS; None if nothing. The files have been checked (listen.py)."""
    if args.ssl_certfile is None:
        return None
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    # A password is always given, for without one OpenSSL would ask the terminal.
    context.load_cert_chain(
        args.ssl_certfile, args.ssl_keyfile, lambda: args.ssl_keyfile_password or ""
    )
    if args.ssl_ca_certs is not None:
        context.load_verify_locations(args.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
