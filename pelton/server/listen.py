"""Sockets and certificates, tried before seconds go into loading a model."""

from __future__ import annotations

import contextlib
import os
import re
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
    certificate = _pem_file("ssl_certfile", args.ssl_certfile, "CERTIFICATE")
    _check_readable("ssl_certfile", args.ssl_certfile)
    if args.ssl_ca_certs is not None:
        _pem_file("ssl_ca_certs", args.ssl_ca_certs, "CERTIFICATE")
        _check_readable("ssl_ca_certs", args.ssl_ca_certs)
    if args.ssl_keyfile is not None:
        key = _pem_file("ssl_keyfile", args.ssl_keyfile, "PRIVATE KEY")
    elif "PRIVATE KEY-----" not in (key := certificate):
        raise ConfigError(
            f"ssl_certfile={args.ssl_certfile!r} holds no private key; name its file as "
            "ssl_keyfile (--ssl-keyfile)."
        )
    _check_key(args, key)


def _pem_file(name: str, file: str, kind: str) -> str:
    """The content of a file in which a `kind` stands. Raises ConfigError."""
    try:
        content = Path(file).read_bytes().decode("latin-1")
    except OSError as error:
        raise ConfigError(f"{name}={file!r} cannot be read: {reason_of(error)}.") from None
    # A key's kind may stand before it: RSA, EC, ENCRYPTED.
    if not re.search(rf"-----BEGIN ([A-Z0-9]+ )*{kind}-----", content):
        raise ConfigError(
            f"{name}={file!r} holds no {kind.lower()} in PEM, which begins with "
            f"-----BEGIN {kind}-----."
        )
    return content


def _check_readable(name: str, file: str) -> None:
    """Certificates of a file. Raises ConfigError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}={file!r} holds a certificate that cannot be read{_says(error)}."
        ) from None


def _check_key(args: ServerArgs, content: str) -> None:
    """Of a certificate that can be read. Raises ConfigError."""
    assert args.ssl_certfile is not None
    has_own = args.ssl_keyfile is not None
    file = f"ssl_keyfile={args.ssl_keyfile!r}" if has_own else f"ssl_certfile={args.ssl_certfile!r}"
    try:
        # A password is always given, for without one OpenSSL would ask the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            args.ssl_certfile, args.ssl_keyfile, lambda: args.ssl_keyfile_password or ""
        )
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            what = f"holds a private key, but not that of ssl_certfile={args.ssl_certfile!r}"
        elif "ENCRYPTED" in content and args.ssl_keyfile_password is None:
            what = "holds an encrypted private key; give ssl_keyfile_password"
        elif "ENCRYPTED" in content:
            what = "holds a private key that ssl_keyfile_password does not open"
        elif reason.startswith(("EE_", "CA_")):
            # OpenSSL's rules about the certificate: too short a key, too weak a digest.
            file = f"ssl_certfile={args.ssl_certfile!r}"
            what = f"is refused by OpenSSL{_says(error)}"
        else:
            what = f"holds a private key that cannot be read{_says(error)}"
        raise ConfigError(f"{file} {what}.") from None


def _says(error: Exception) -> str:
    """OpenSSL's reason, where it has one."""
    reason = getattr(error, "reason", None)
    return f": {str(reason).replace('_', ' ').lower()}" if reason else ""
