"""Names of requests. Every answer carries one as X-Request-Id, whoever gives it: an endpoint, the
router, or the parser of HTTP."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pelton.errors import RequestError

HEADER = "X-Request-Id"
MAX_ID_LENGTH = 200

_PLAIN = re.compile(r"[\w.:/@+=~-]+", re.ASCII)
_RAW_HEADER = HEADER.lower().encode()
_KEY = "pelton.request_id"


def new_id() -> str:
    """Unique."""
    return f"req-{uuid.uuid4().hex}"


@dataclass(slots=True)
class RequestId:
    """own: ours, unique. given: the client's own name of the request, if it has one that can be
    shown. refusal: what is wrong with the name in the header, to be raised by who answers."""

    own: str = field(default_factory=new_id)
    given: str | None = None
    refusal: RequestError | None = None

    @property
    def shown(self) -> str:
        """In headers."""
        return self.own if self.given is None else self.given

    @property
    def logged(self) -> str:
        """In logs: one word, or in quotes, so that no name can pass for more of the line."""
        return logged(self.shown)

    def check(self) -> None:
        """Raises RequestError."""
        if self.refusal is not None:
            raise self.refusal

    def name_by_field(self, given: str | None) -> None:
        """`request_id` of a body; the header goes before it. Raises RequestError."""
        if given is not None:
            checked = _checked(given, "request_id")
            self.given = checked if self.given is None else self.given


def id_of(scope: Scope) -> RequestId:
    """The one of a request, the same each time it is asked for."""
    found = scope.get(_KEY)
    if not isinstance(found, RequestId):
        found = scope[_KEY] = _named(scope["headers"])
    return found


def _named(headers: Iterable[tuple[bytes, bytes]]) -> RequestId:
    values = dict.fromkeys(value for name, value in headers if name == _RAW_HEADER)
    if not values:
        return RequestId()
    try:
        if len(values) > 1:
            raise RequestError(f"{HEADER} must stand there once, got {len(values)}.", field=HEADER)
        (value,) = values
        return RequestId(given=_checked(value.decode("latin-1"), HEADER))
    except RequestError as error:
        return RequestId(refusal=error)


def _checked(given: str, name: str) -> str:
    """A client's name of its request; it goes into headers and logs. Raises RequestError."""
    shown = repr(given) if len(given) <= MAX_ID_LENGTH else f"{len(given)} characters"
    if not given or len(given) > MAX_ID_LENGTH or not (given.isascii() and given.isprintable()):
        raise RequestError(
            f"{name} must have 1 to {MAX_ID_LENGTH} printable ASCII characters, got {shown}.",
            field=name,
        )
    if given != given.strip():
        # No header's value may, and every answer has one of this name.
        raise RequestError(f"{name} must not begin or end with a space, got {shown}.", field=name)
    return given


def logged(name: str) -> str:
    """A client's name of its request as a log has it."""
    return name if _PLAIN.fullmatch(name) else repr(name)


class Named:
    """An ASGI application around `app`, all of whose answers carry the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = id_of(scope)

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                shown = request_id.shown.encode()
                message = {**message, "headers": [*message["headers"], (_RAW_HEADER, shown)]}
            await send(message)

        await self._app(scope, receive, named_send)
