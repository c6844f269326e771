from __future__ import annotations

import pytest

from pelton.config.server_url import read_server_url
from pelton.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port", "root"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, ""),
        ("http://localhost/v1/", "localhost", 80, ""),
        ("HTTPS://Example.org/llm/v1", "example.org", 443, "/llm"),
        ("http://[::1]:5/", "::1", 5, ""),
        ("http://my_host", "my_host", 80, ""),
    ],
)
def test_urls(text: str, host: str, port: int, root: str) -> None:
    found = read_server_url(text)
    assert (found.host, found.port, found.root) == (host, port, root)
    assert found.is_secure == text.lower().startswith("https")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "starts with http:// or https://"),
        ("notaurl", "starts with http:// or https://"),
        ("127.0.0.1:8000", "starts with http:// or https://"),
        ("ftp://x", "starts with http:// or https://"),
        ("http://", "and a host"),
        ("http:///v1", "and a host"),
        ("http://[x", "no valid host"),
        ("http://[x]", "no valid host"),
        ("http://[::1", "no valid host"),
        ("http://a,b", "no valid host"),
        ("http://a b", "a space"),
        ("http://x\n", "a space"),
        ("http://x:99999999", "no valid port"),
        ("http://x:y", "no valid port"),
        ("http://x:", "no valid port"),
        ("http://x:0", "no valid port"),
        ("http://me:secret@x", "names a user"),
        ("http://x/?a=1", "goes on after its path"),
        ("http://x/#a", "goes on after its path"),
    ],
)
def test_what_is_no_url(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_server_url(text)
    sentence = str(refusal.value)
    assert sentence.startswith(f"url={text!r} ")
    assert words in sentence
    assert "http://127.0.0.1:8000" in sentence
