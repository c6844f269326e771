"""The URL of a server that speaks OpenAI's API, as users write it."""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass

from pelton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """text: as it was given. authority: host and port as written. root: of the server's paths,
    without /v1 and a slash at its end."""

    text: str
    is_secure: bool
    host: str
    port: int
    authority: str
    root: str


def read_server_url(text: str) -> ServerUrl:
    """Raises ConfigError for what is no http:// or https:// URL of a host, perhaps with a port and
    a path; with or without /v1 at its end."""

    def wrong(what: str) -> ConfigError:
        return ConfigError(
            f"url={text!r} {what}; it is written as http://127.0.0.1:8000 or https://example.org/v1."
        )

    if not re.match(r"https?://[^/?#]", text, re.IGNORECASE):
        raise wrong("is none of a server, which starts with http:// or https:// and a host")
    if re.search(r"[^!-~]", text):
        raise wrong("holds a space or another character that no URL has")
    try:
        parts = urllib.parse.urlsplit(text)
        host = parts.hostname
    except ValueError:
        raise wrong("has no valid host") from None
    try:
        port = parts.port
    except ValueError:
        raise wrong("has no valid port, which is a number from 1 to 65535") from None
    if not host or not re.fullmatch(r"[\w.:%-]+", host):
        raise wrong("has no valid host")
    if port == 0 or parts.netloc.endswith(":"):
        raise wrong("has no valid port, which is a number from 1 to 65535")
    if "@" in parts.netloc:
        raise wrong("names a user, which no server of this API asks for (keys are --api-key)")
    if parts.query or parts.fragment:
        raise wrong("goes on after its path")
    is_secure = parts.scheme == "https"
    return ServerUrl(
        text=text,
        is_secure=is_secure,
        host=host,
        port=port or (443 if is_secure else 80),
        authority=parts.netloc,
        root=parts.path.rstrip("/").removesuffix("/v1"),
    )
