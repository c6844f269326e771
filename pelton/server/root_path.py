"""A prefix under which a proxy serves this server, whether it takes the prefix away or not."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UnderPrefix:
    """An ASGI application around `app`, whose paths all begin with `root_path`, as ASGI has it.

    root_path: "" or the prefix, such as "/llm".
    routes: what there is. A path that one of them has as it stands keeps its prefix: with "/v1",
        the path /v1/models comes from a proxy that has taken /v1 away, or from no proxy.
    """

    def __init__(self, app: ASGIApp, root_path: str, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._root_path = root_path
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._root_path and scope["type"] == "http":
            path = self._root_path + self._own_path(scope)
            scope = {**scope, "path": path, "root_path": self._root_path}

        async def send_relative(message: Message) -> None:
            _make_relative(message)
            await send(message)

        await self._app(scope, receive, send_relative)

    def _own_path(self, scope: Scope) -> str:
        path: str = scope["path"]
        has_prefix = path == self._root_path or path.startswith(self._root_path + "/")
        if not has_prefix or any(route.matches(scope)[0] != Match.NONE for route in self._routes):
            return path
        return path.removeprefix(self._root_path)


def _make_relative(message: Message) -> None:
    """A redirect names no scheme and no host: behind a proxy ours are not the client's."""
    if message["type"] != "http.response.start":
        return
    headers = MutableHeaders(scope=message)
    if "location" in headers:
        parts = urlsplit(headers["location"])
        path = "/" + parts.path.lstrip("/")  # "//host" would be another one's
        headers["location"] = parts._replace(scheme="", netloc="", path=path).geturl()


def path_of(scope: Scope) -> str:
    """The path of a request, without the prefix: as messages and logs tell it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
