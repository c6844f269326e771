from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from support.certificates import make_certificate

from pelton.config.server import ServerArgs
from pelton.errors import ConfigError
from pelton.server.errors import ApiError
from pelton.server.keys import KeyGuard, read_keys
from pelton.server.listen import bound_socket, url_of
from pelton.server.options import check_server


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("port", 70000, "from 0 to 65535"),
        ("port", "80", "an integer"),
        ("port", True, "an integer"),
        ("host", 5, "text"),
        ("log_level", "loud", "Known: debug"),
        ("log_requests", "yes", "true or false"),
        ("log_interval", -1.0, "0 or more"),
        ("log_interval", float("nan"), "0 or more"),
        ("shutdown_timeout", float("inf"), "0 or more"),
        ("max_body_bytes", 0, "from 1"),
        ("head_timeout", 0.0, "more than 0"),
        ("body_timeout", float("inf"), "more than 0"),
        ("send_timeout", -1, "more than 0"),
        ("max_num_queued_reqs", -1, "from 0"),
        ("served_model_name", [""], "not be empty"),
        ("served_model_name", "x", "a list of texts"),
        ("api_key", [5], "got a list"),
        ("metrics_prefix", "a:b", "letters, digits"),
        ("root_path", "llm", "begin with a slash"),
        ("root_path", "/llm/", "not end with one"),
        ("chat_template_content_format", "openai", "Known: auto"),
        ("ssl_keyfile", "key.pem", "needs ssl_certfile"),
        ("ssl_certfile", "/nowhere/cert.pem", "is no file"),
    ],
)
def test_wrong_options(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as wrong:
        check_server(ServerArgs(**{field: value}))
    assert field in str(wrong.value)


def test_good_options() -> None:
    check_server(ServerArgs())
    check_server(ServerArgs(shutdown_timeout=3, log_interval=0, root_path="/a/b"))


def test_certificates(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    check_server(ServerArgs(ssl_certfile=certificate, ssl_keyfile=key))
    with pytest.raises(ConfigError, match="cannot be used"):
        check_server(ServerArgs(ssl_certfile=key, ssl_keyfile=certificate))
    args = ServerArgs(ssl_certfile=certificate, ssl_keyfile=key, port=0)
    with bound_socket(args) as listener:
        assert url_of(args, listener).startswith("https://127.0.0.1:")


def test_an_address_in_use() -> None:
    with bound_socket(ServerArgs(port=0)) as listener:
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="--port"), bound_socket(ServerArgs(port=port)):
            pass
    with pytest.raises(ConfigError, match="no address"), bound_socket(ServerArgs(host="a b")):
        pass


def test_unix_sockets(tmp_path: Path) -> None:
    args = ServerArgs(uds=str(tmp_path / "pelton.sock"))
    with bound_socket(args) as listener:
        listener.listen()
        assert url_of(args, listener) == f"http+unix://{tmp_path}/pelton.sock"
        with pytest.raises(ConfigError, match="uds"), bound_socket(args):
            pass
    assert not (tmp_path / "pelton.sock").exists()
    (tmp_path / "pelton.sock").write_text("a file")
    with pytest.raises(ConfigError, match="uds"), bound_socket(args):
        pass
    assert (tmp_path / "pelton.sock").read_text() == "a file"


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two  # theirs\n")
    assert read_keys(["zero"], str(file), "three, four,") == ["zero", "three", "four", "one", "two"]
    assert read_keys([], None, "") == []
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys([], str(tmp_path / "absent"), "")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys([], str(file), "")
    with pytest.raises(ConfigError, match="printable ASCII"):
        read_keys(["schlüssel"], None, "")


@pytest.mark.parametrize(
    ("header", "enters"),
    [
        (b"Bearer one", True),
        (b"bearer two", True),
        (b"Bearer  one ", True),
        (b"Bearer on", False),
        (b"Bearer one two", False),
        (b"Basic one", False),
        (b"one", False),
        (b"", False),
        (b"Bearer \xff\xfe", False),
    ],
)
def test_the_guard(header: bytes, enters: bool) -> None:
    request = Request({"type": "http", "headers": [(b"authorization", header)]})
    guard = KeyGuard(["one", "two"])
    if enters:
        guard(request)
        return
    with pytest.raises(ApiError) as refusal:
        guard(request)
    assert refusal.value.status == 401
    KeyGuard([])(request)
