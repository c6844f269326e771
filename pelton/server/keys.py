"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.requests import Request

from pelton.config.reasons import reason_of
from pelton.errors import ConfigError
from pelton.server.errors import ApiError


class KeyGuard:
    """Lets in who sends `Authorization: Bearer KEY` with one of the keys; everybody if there are
    none. How long it takes tells nothing about them."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __call__(self, request: Request) -> None:
        """Raises ApiError, 401."""
        if not self._digests:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if kind.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "A valid API key is needed: send it as Authorization: Bearer KEY.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def open_to_all(request: Request) -> None:
    """The guard of what needs no key."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(given: Sequence[str] | None, file: str | None, environment: str | None) -> list[str]:
    """The keys of flags, of a file (one per line; a line that begins with # is a comment) and of an
    environment variable (separated by commas); None: not given. Raises ConfigError, also for a
    source that is given and empty: who meant to have a key must not get an open server."""
    keys: list[str] = []
    if given is not None:
        if not given or not all(key.strip() for key in given):
            raise ConfigError(
                "api_key is empty (an unset variable, perhaps); give a key, or leave api_key out "
                "for a server that is open to all."
            )
        keys += given
    if environment is not None:
        if not environment.replace(",", "").strip():
            raise ConfigError(
                "PELTON_API_KEY is set and holds no key; give it one, or unset it for a server "
                "that is open to all."
            )
        keys += environment.split(",")
    if file is not None:
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"api_key_file={file!r} cannot be read: {reason_of(error)}."
            ) from None
        stripped = [line.strip() for line in lines]
        found = [line for line in stripped if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"api_key_file={file!r} holds no key; write one per line.")
        keys += found
    keys = [key.strip() for key in keys if key.strip()]
    for key in keys:
        # HTTP headers are Latin-1 at best; a key that cannot be sent would lock everybody out.
        if not (key.isascii() and key.isprintable()):
            raise ConfigError("an API key must have printable ASCII characters alone.")
        if " " in key:
            raise ConfigError(
                "an API key must have no spaces; in a file, a comment needs a line of its own."
            )
    return keys
