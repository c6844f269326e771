"""Mutual TLS: who may come in, and what those are told who may not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.certificates import make_certificate
from support.scripted_engine import scripted_llm
from support.serving import run, served, served_in_thread

from pelton.cli.api import ClientCertificate, ServerApi
from pelton.errors import ConfigError, EngineError
from pelton.server.tls import _Handshake

ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    names = {"server": "localhost", "client": "client", "stranger": "stranger"}
    return {who: make_certificate(folder / who, name) for who, name in names.items()}


def options(files: dict[str, tuple[str, str]]) -> dict[str, Any]:
    certificate, key = files["server"]
    return {"ssl_certfile": certificate, "ssl_keyfile": key, "ssl_ca_certs": files["client"][0]}


@contextlib.contextmanager
def mutual(files: dict[str, tuple[str, str]]) -> Iterator[str]:
    with served_in_thread(lambda: scripted_llm(), **options(files)) as url:
        yield url.replace("http://127.0.0.1", "https://localhost")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize(
    ("who", "alert", "line"),
    [
        ("client", None, None),
        ("stranger", "UNKNOWN_CA", "self-signed certificate"),
        (None, "CERTIFICATE_REQUIRED|HANDSHAKE_FAILURE", "peer did not return a certificate"),
    ],
)
def test_who_is_refused_is_told_why(
    files: dict[str, tuple[str, str]],
    caplog: pytest.LogCaptureFixture,
    version: ssl.TLSVersion,
    who: str | None,
    alert: str | None,
    line: str | None,
) -> None:
    async def main() -> None:
        trust = ssl.create_default_context(cafile=files["server"][0])
        trust.maximum_version = version
        if who is not None:
            trust.load_cert_chain(*files[who])
        async with served(scripted_llm(), **options(files)) as server:

            async def ask() -> bytes:
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=trust, server_hostname="localhost"
                )
                writer.write(ASK)
                await writer.drain()
                await asyncio.sleep(0.05)  # what the server reads must not cost the alert
                try:
                    return await reader.readline()
                finally:
                    writer.close()

            if alert is None:
                assert b" 200 " in await ask()
            else:
                with pytest.raises(ssl.SSLError, match=alert):
                    await ask()

    with caplog.at_level(logging.INFO, "pelton.server"):
        run(main)
    lines = [record.message for record in caplog.records if "TLS" in record.message]
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]


def test_a_refused_client_that_goes_on_is_not_listened_to(
    files: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what it sends is kept."""
    made: list[_Handshake] = []
    handshake = _Handshake.do_handshake

    def noted(self: _Handshake) -> None:
        made.append(self)
        handshake(self)

    monkeypatch.setattr(_Handshake, "do_handshake", noted)

    async def main() -> None:
        async with served(scripted_llm(), **options(files)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"\x16\x03\x01\x00\x05hello")
            assert (await reader.readexactly(7))[:1] == b"\x15"  # an alert
            for _ in range(20):
                writer.write(b"x" * 100_000)
                await writer.drain()
            await asyncio.sleep(0.05)
            assert len(made) > 2
            assert made[-1].incoming.pending == 0
            writer.close()

    run(main)


def test_a_client_with_a_certificate(
    files: dict[str, tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", files["server"][0])
    with mutual(files) as url:
        assert ServerApi(url, None, None, ClientCertificate(*files["client"])).model
        both = tmp_path / "both.pem"
        both.write_bytes(b"".join(Path(file).read_bytes() for file in files["client"]))
        assert ServerApi(url, None, None, ClientCertificate(str(both), None)).model
        with pytest.raises(
            EngineError, match=r"wants a certificate of its clients \(--client-cert"
        ):
            ServerApi(url, None, None)
        with pytest.raises(EngineError, match="unknown ca"):
            ServerApi(url, None, None, ClientCertificate(*files["stranger"]))
        for certificate, words in (
            (ClientCertificate("/no/file", None), "client_cert='/no/file' cannot be read: No such"),
            (ClientCertificate(files["client"][0], "/no/key"), "client_key='/no/key' cannot be re"),
            (
                ClientCertificate(files["client"][0], None),
                "must hold a certificate and its private",
            ),
            (ClientCertificate(files["client"][0], files["stranger"][1]), "key values mismatch"),
        ):
            with pytest.raises(ConfigError, match=words):
                ServerApi(url, None, None, certificate)
    with pytest.raises(ConfigError, match="client_cert is for TLS"):
        ServerApi("http://localhost:1", None, None, ClientCertificate(*files["client"]))
