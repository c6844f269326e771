"""Sockets and certificates, tried before seconds go into loading a model."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import ssl
from collections.abc import Generator
from pathlib import Path

from pelton.config.reasons import reason_of
from pelton.config.server import ServerArgs
from pelton.errors import ConfigError

_MAX_FILES = 65536


@contextlib.contextmanager
def bound_socket(args: ServerArgs) -> Generator[socket.socket, None, None]:
    """The server's address, taken but not listened at: until it is, connections are refused.

    Raises ConfigError if it cannot be had.
    """
    if args.uds is not None:
        with _unix_socket(Path(args.uds)) as listener:
            yield listener
        return
    try:
        found = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # "localhost" is often both; most clients try 127.0.0.1.
        family, _, _, _, address = min(found, key=lambda item: item[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host={args.host!r} is no address of this machine: {reason_of(error)}."
        ) from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {args.host}, port {args.port}: {reason_of(error)}; choose "
                "another --port or --host."
            ) from None
        yield listener


def raise_file_limit() -> None:
    """Each connection takes a file, and many systems allow 1024 unless they are asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # as few as there were, then
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _unix_socket(path: Path) -> Generator[socket.socket, None, None]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with listener:
        try:
            if path.is_socket() and _is_left_over(path):
                path.unlink()
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError(f"cannot listen at uds={str(path)!r}: {reason_of(error)}.") from None
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_left_over(path: Path) -> bool:
    """Whether nobody listens there: its server was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) != 0


def url_of(args: ServerArgs, listener: socket.socket) -> str:
    """Where clients find the server, as far as this machine knows."""
    scheme = "http" if args.ssl_certfile is None else "https"
    if args.uds is not None:
        return f"{scheme}+unix://{os.path.abspath(args.uds)}"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{args.root_path}"


def check_certificates(args: ServerArgs) -> None:
    """Raises ConfigError for files that TLS cannot be spoken with."""
    if args.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name} needs ssl_certfile.")
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        file = getattr(args, name)
        if file is not None and not os.path.isfile(file):
            raise ConfigError(f"{name}={file!r} is no file.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A password is always given, for without one OpenSSL would ask the terminal.
        context.load_cert_chain(
            args.ssl_certfile, args.ssl_keyfile, lambda: args.ssl_keyfile_password or ""
        )
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ssl_certfile={args.ssl_certfile!r}, ssl_keyfile={args.ssl_keyfile!r}, ssl_ca_certs="
            f"{args.ssl_ca_certs!r} cannot be used: {reason_of(error)}."
        ) from None
