"""The other side of `pelton chat` and `pelton complete`: a server, or an engine of our own."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib
import json
import queue
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pelton.cli.flags import Parser, given
from pelton.cli.serve import needs_server_packages
from pelton.config.engine import EngineArgs
from pelton.config.env import api_keys
from pelton.config.reasons import reason_of
from pelton.config.server import ServerArgs
from pelton.config.server_url import read_server_url
from pelton.errors import ConfigError, EngineError, RequestError

_CONNECT_SECONDS = 10.0
_READ_SECONDS = 600.0
_END = object()


class Api(Protocol):
    """OpenAI's API, as far as it is needed. model: the name of what answers. fields: those that a
    body may have; None where only the server knows."""

    model: str
    fields: frozenset[str] | None

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer; leaving the iteration ends the request.

        Raises RequestError for what is wrong with the body, EngineError kin for the rest.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """PEM files. key_file: None if the key stands beside the certificate."""

    file: str
    key_file: str | None


class ServerApi:
    """A server's. url: with or without /v1. model: None = the first one that it has. certificate:
    for servers that want one of their clients.

    Raises ConfigError for what is no URL or no certificate, EngineError if nobody answers there.
    """

    fields: frozenset[str] | None = None

    def __init__(
        self,
        url: str,
        key: str | None,
        model: str | None,
        certificate: ClientCertificate | None = None,
    ) -> None:
        self._server = read_server_url(url)
        self._url = url
        self._context = None
        if self._server.is_secure:
            self._context = _tls_context(certificate)
        elif certificate is not None:
            raise ConfigError(f"client_cert is for TLS; url={url!r} does not start with https://.")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.model = model or self._first_model()

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {**body, "model": self.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        with self._answer("POST", path, json.dumps(body).encode()) as response:
            try:
                for line in response:
                    kind, _, data = line.strip().partition(b":")
                    if kind != b"data":
                        continue
                    if data.strip() == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise EngineError(_message(chunk, "the server failed"))
                    yield chunk
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise EngineError(
                    f"the answer from {self._url} broke off: {reason_of(error)}."
                ) from None
        raise EngineError(f"the answer from {self._url} broke off.")

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A whole answer. Raises as `events` does."""
        with self._answer(
            "POST", path, json.dumps({**body, "model": self.model}).encode()
        ) as found:
            try:
                answer = json.loads(found.read())
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise EngineError(
                    f"the answer from {self._url} broke off: {reason_of(error)}."
                ) from None
        if not isinstance(answer, dict):
            raise EngineError(f"{self._url} does not answer as servers of OpenAI's API do.")
        return answer

    def close(self) -> None:
        pass

    def _first_model(self) -> str:
        with self._answer("GET", "/v1/models", None) as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                raise EngineError(f"{self._url} does not tell its models; pass one.") from None

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None
    ) -> Iterator[http.client.HTTPResponse]:
        server = self._server
        connection: http.client.HTTPConnection
        if self._context is not None:
            connection = http.client.HTTPSConnection(
                server.host, server.port, timeout=_CONNECT_SECONDS, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(
                server.host, server.port, timeout=_CONNECT_SECONDS
            )
        with contextlib.closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(_READ_SECONDS)
                connection.request(method, server.root + path, body, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    text = response.read()
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{self._url} does not answer: {_why(error)}.") from None
            if response.status != 200:
                raise _refusal(
                    response.status, text, self._url.rstrip("/").removesuffix("/v1") + path
                )
            yield response


def _tls_context(certificate: ClientCertificate | None) -> ssl.SSLContext:
    """Raises ConfigError for files without a certificate or its key."""
    context = ssl.create_default_context()
    if certificate is None:
        return context
    files = {"client_cert": certificate.file, "client_key": certificate.key_file}
    for name, file in files.items():
        try:
            if file is not None:
                Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}={file!r} cannot be read: {reason_of(error)}.") from None
    try:
        context.load_cert_chain(certificate.file, certificate.key_file)
    except (OSError, ValueError) as error:
        given = " and ".join(f"{name}={file!r}" for name, file in files.items() if file)
        reason = str(getattr(error, "reason", None) or "no PEM").replace("_", " ").lower()
        raise ConfigError(
            f"{given} must hold a certificate and its private key in PEM; OpenSSL says: {reason}."
        ) from None
    return context


def _why(error: Exception) -> str:
    if "CERTIFICATE_REQUIRED" in str(getattr(error, "reason", "")):
        return "it wants a certificate of its clients (--client-cert)"
    return reason_of(error)


def add_server(parser: Parser) -> None:
    """Flags of commands that may ask a server instead of loading a model."""
    parser.add_argument(
        "--url", help="ask the server there, such as http://127.0.0.1:8000; else MODEL is loaded"
    )
    parser.add_argument("--model-name", metavar="NAME", help="the server's model; its first one")
    parser.add_argument(
        "--api-key", metavar="KEY", help="the server's; else the first one in PELTON_API_KEY"
    )
    parser.add_argument(
        "--client-cert",
        metavar="FILE",
        help="certificate in PEM, for a server that wants one of its clients (mutual TLS)",
    )
    parser.add_argument(
        "--client-key", metavar="FILE", help="its private key; else it stands in the same file"
    )


def check_server_flags(
    parser: Parser, options: argparse.Namespace, engine_flags: Sequence[str], hint: str = ""
) -> None:
    """Exits on flags that do not go together. engine_flags: of the model that is loaded without
    --url. hint: what to do instead of naming a MODEL beside it."""
    if options.url is not None:
        for name in given(options, ["model", *engine_flags]):
            word = "MODEL" if name == "model" else "--" + name.replace("_", "-")
            more = hint if name == "model" else ""
            parser.error(
                f"{word} and --url exclude each other: the server has its model already{more}"
            )
    else:
        for name in ("model_name", "api_key", "client_cert", "client_key"):
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is for a server; add --url")
    if options.client_key is not None and options.client_cert is None:
        parser.error("--client-key needs --client-cert")


def open_server(options: argparse.Namespace) -> ServerApi:
    """The one of --url. Raises ConfigError, EngineError."""
    key = options.api_key or (api_keys() or "").split(",")[0].strip()
    certificate = None
    if options.client_cert is not None:
        certificate = ClientCertificate(options.client_cert, options.client_key)
    return ServerApi(options.url, key, options.model_name, certificate)


class OwnApi:
    """An engine's that is started here, and ends with `close`; in a thread of its own, so that
    whoever reads an answer may be interrupted at any time."""

    def __init__(self, engine_args: EngineArgs, args: ServerArgs, *, command: str) -> None:
        with needs_server_packages(command):
            local = importlib.import_module("pelton.server.local")
            protocol = importlib.import_module("pelton.server.protocol")
        kinds = (protocol.ChatBody, protocol.CompletionBody)
        self.fields: frozenset[str] | None = frozenset(
            name for kind in kinds for name in kind.__struct_fields__
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pelton-api")
        self._thread.start()
        self._opened = local.open_local(engine_args, args)
        try:
            self._api = self._do(self._opened.__aenter__())
        except BaseException:
            self._stop()
            raise
        self.model = str(self._api.state.names[0])

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        raw = json.dumps(body).encode()

        async def pump() -> None:
            try:
                async with contextlib.aclosing(self._api.events(path, raw)) as events:
                    async for event in events:
                        arrived.put(event)
                arrived.put(_END)
            except Exception as error:
                arrived.put(error)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := arrived.get()) is not _END:
                if isinstance(item, Exception):
                    status = getattr(item, "status", None)
                    if status is None:
                        raise item
                    raise _refused(status, str(item), getattr(item, "param", None))
                yield json.loads(item)
        finally:
            pumping.cancel()

    def close(self) -> None:
        self._do(self._opened.__aexit__(None, None, None))
        self._stop()

    def _do(self, coroutine: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(_as_task(coroutine), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        """What was cancelled gets the time to clean up."""

        async def rest() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(rest(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _as_task(awaitable: Any) -> Any:
    return await awaitable


def _refusal(status: int, text: bytes, url: str) -> RequestError | EngineError:
    answer = None
    with contextlib.suppress(ValueError):
        answer = json.loads(text)
    message = _message(answer, "")
    otherwise = f"{url} answered with status {status}, and not as servers of OpenAI's API do."
    error = answer.get("error") if isinstance(answer, dict) else None
    field = error.get("param") if isinstance(error, dict) else None
    return _refused(status, message or otherwise, field if isinstance(field, str) else None)


def _refused(status: int, message: str, field: str | None) -> RequestError | EngineError:
    if 400 <= status < 500:
        return RequestError(message, field=field)
    return EngineError(message)


def _message(answer: Any, default: str) -> str:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else default
