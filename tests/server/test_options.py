from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from support.certificates import make_certificate, make_encrypted

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
        ("host", 5, "text, got 5; put it in quotes"),
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
        ("api_key", [5], "got a list; put it in quotes"),
        ("api_key", 12345, "must be a list of texts, got an integer; put it in quotes"),
        ("served_model_name", [1.5], "in quotes"),
        ("allowed_origins", ["example.org"], "'example.org' would never match: it has no scheme"),
        ("allowed_origins", ["https://a.org/"], "goes on after host"),
        ("allowed_origins", ["https://a.org/app"], "goes on after host"),
        ("allowed_origins", ["https://a.org?x"], "goes on after host"),
        ("allowed_origins", ["https://*.a.org"], "stands for all origins, alone"),
        ("allowed_origins", ["https://A.org"], "small letters"),
        ("allowed_origins", ["https://a.org:443"], "port that is the scheme's own"),
        ("allowed_origins", ["http://a.org:80"], "port that is the scheme's own"),
        ("allowed_origins", ["https://a.org", "https://a b"], "'https://a b' would never"),
        ("allowed_origins", ["https://"], "no scheme://host"),
        ("allowed_origins", [""], "no scheme"),
        ("metrics_prefix", "a:b", "letters, digits"),
        ("root_path", "llm", "begin with a slash"),
        ("root_path", "/llm/", "not end with one"),
        ("chat_template_content_format", "openai", "Known: auto"),
        ("ssl_keyfile", "key.pem", "needs ssl_certfile"),
        ("ssl_certfile", "/nowhere/cert.pem", "No such file"),
    ],
)
def test_wrong_options(field: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as wrong:
        check_server(ServerArgs(**{field: value}))
    assert field in str(wrong.value)


def test_good_options() -> None:
    check_server(ServerArgs())
    check_server(ServerArgs(shutdown_timeout=3, log_interval=0, root_path="/a/b"))
    origins = ["https://a.org", "http://localhost:3000", "http://[::1]:8000", "https://a.org:80"]
    origins += ["*", "null", "chrome-extension://abc", "http://127.0.0.1:8080"]
    check_server(ServerArgs(allowed_origins=origins))


def test_certificates(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    check_server(ServerArgs(ssl_certfile=certificate, ssl_keyfile=key))
    args = ServerArgs(ssl_certfile=certificate, ssl_keyfile=key, port=0)
    with bound_socket(args) as listener:
        assert url_of(args, listener).startswith("https://127.0.0.1:")


def test_wrong_certificates(tmp_path: Path) -> None:
    """Each file is named, and what is wrong with it."""
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    _, other_key = make_certificate(tmp_path / "other")
    locked, torn, torn_key, both = (
        str(tmp_path / name) for name in ("locked.pem", "torn.pem", "torn_key.pem", "both.pem")
    )
    make_encrypted(key, locked, "secret")
    Path(torn).write_bytes(Path(certificate).read_bytes()[:300])
    Path(torn_key).write_bytes(Path(key).read_bytes()[:300])
    Path(both).write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    (tmp_path / "text.pem").write_text("hello")
    text = str(tmp_path / "text.pem")
    check_server(ServerArgs(ssl_certfile=both))
    check_server(
        ServerArgs(ssl_certfile=certificate, ssl_keyfile=locked, ssl_keyfile_password="secret")
    )
    wrong: list[tuple[dict[str, str], str, str]] = [
        ({"ssl_certfile": text, "ssl_keyfile": key}, f"ssl_certfile={text!r}", "no certificate"),
        ({"ssl_certfile": key, "ssl_keyfile": key}, f"ssl_certfile={key!r}", "no certificate"),
        ({"ssl_certfile": torn, "ssl_keyfile": key}, f"ssl_certfile={torn!r}", "cannot be read"),
        ({"ssl_certfile": certificate}, f"ssl_certfile={certificate!r}", "no private key; name"),
        ({"ssl_keyfile": certificate}, f"ssl_keyfile={certificate!r}", "no private key in PEM"),
        ({"ssl_keyfile": text}, f"ssl_keyfile={text!r}", "no private key in PEM"),
        ({"ssl_keyfile": torn_key}, f"ssl_keyfile={torn_key!r}", "cannot be read"),
        ({"ssl_keyfile": other_key}, f"ssl_keyfile={other_key!r}", "but not that of ssl_certfile"),
        ({"ssl_keyfile": locked}, f"ssl_keyfile={locked!r}", "give ssl_keyfile_password"),
        (
            {"ssl_keyfile": locked, "ssl_keyfile_password": "guess"},
            f"ssl_keyfile={locked!r}",
            "does not open",
        ),
        ({"ssl_keyfile": str(tmp_path)}, f"ssl_keyfile={str(tmp_path)!r}", "Is a directory"),
        ({"ssl_keyfile": "/no/key"}, "ssl_keyfile='/no/key'", "No such file"),
        ({"ssl_keyfile": key, "ssl_ca_certs": key}, f"ssl_ca_certs={key!r}", "no certificate"),
        ({"ssl_keyfile": key, "ssl_ca_certs": torn}, f"ssl_ca_certs={torn!r}", "cannot be read"),
    ]
    for files, named, words in wrong:
        with pytest.raises(ConfigError) as found:
            check_server(ServerArgs(**{"ssl_certfile": certificate, **files}))
        assert str(found.value).startswith(named)
        assert words in str(found.value)
        assert "rror" not in str(found.value)


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
    file.write_text("# ours\none\n\n two \n  # theirs\nk3#x\n")
    assert read_keys(["zero"], str(file), "three, four,") == [
        "zero", "three", "four", "one", "two", "k3#x",
    ]  # fmt: skip
    assert read_keys(None, None, None) == []
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(None, str(tmp_path / "absent"), None)
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(None, str(file), None)
    with pytest.raises(ConfigError, match="printable ASCII"):
        read_keys(["schlüssel"], None, None)
    file.write_text("one # a comment\n")
    with pytest.raises(ConfigError, match="a comment needs a line of its own"):
        read_keys(None, str(file), None)


@pytest.mark.parametrize("given", [[""], [" "], ["one", ""], []])
def test_an_empty_key_does_not_open_the_server(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="api_key is empty"):
        read_keys(given, None, "three")


@pytest.mark.parametrize("environment", ["", "  ", " , "])
def test_an_empty_variable_does_not_open_the_server(environment: str) -> None:
    with pytest.raises(ConfigError, match="PELTON_API_KEY is set and holds no key"):
        read_keys(["one"], None, environment)


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
