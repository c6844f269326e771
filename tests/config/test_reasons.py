from __future__ import annotations

import errno
import socket
import ssl

import pytest

from pelton.config.reasons import reason_of


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "x", "y"), "No such file or directory"),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('::1', 9)"),
            "Connection refused",
        ),
        (
            OSError("Multiple exceptions: [Errno 111] Connect, [Errno 111] Connect"),
            "nobody takes the connection",
        ),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (TimeoutError("timed out"), "timed out"),
        (EOFError("the connection was closed"), "the connection was closed"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "it is not text in utf-8"),
    ],
)
def test_no_numbers_and_no_brackets(error: Exception, words: str) -> None:
    assert reason_of(error) == words


def test_what_is_wrong_with_tls() -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: X] certificate verify failed (_ssl.c:1)")
    error.verify_message = "self-signed certificate"
    assert reason_of(error).startswith("its certificate cannot be trusted: self-signed cert")
    other = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1)")
    other.reason = "WRONG_VERSION_NUMBER"
    assert reason_of(other) == "TLS failed: wrong version number"
