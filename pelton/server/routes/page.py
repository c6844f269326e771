"""GET / and /web/...: the chat page, files of `pelton/server/web`."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from pelton.server.endpoint import Answer, Call, Handler

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The page loads nothing from elsewhere and runs nothing that stands in a text; where the browser
# knows trusted types, no string can become HTML at all.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
_HEADERS = {
    "content-security-policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # a newer server's page shows at once
}


def handlers() -> dict[str, Handler]:
    """By path. Files are read here, once; no path leads to any other."""
    found: dict[str, Handler] = {}
    for file in files("pelton.server.web").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            handler = _handler(file.read_bytes(), kind)
            found["/" if file.name == "index.html" else f"/web/{file.name}"] = handler
    return found


def _handler(content: bytes, kind: str) -> Handler:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def show(call: Call) -> Answer:
        if call.request.headers.get("if-none-match") == tag:
            return Answer(content_type=kind, status=304, headers=headers)
        return Answer(content, content_type=kind, headers=headers)

    return show
