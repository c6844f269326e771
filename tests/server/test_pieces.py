from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.server import pieces
from pelton.server.bodies import parse
from pelton.server.protocol import ChatBody, CompletionBody

# Of what may be cut apart: escapes, escaped backslashes and quotes, surrogate pairs, UTF-8.
LETTERS = st.text(st.sampled_from('ab"\\/\n\u00e9\u20ac\U0001f60a\ud7ff\ue000'), max_size=200)
TEXTS = LETTERS | st.text(max_size=50)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)
PROMPTS = (
    TEXTS | st.lists(st.integers(0, 50000)) | st.lists(TEXTS) | st.lists(st.lists(st.integers()))
)
BYTES = [b'"', b"\\", b",", b"x", b"\xff"]


def outcome(decode: Any, body: bytes, kind: type[msgspec.Struct]) -> Any:
    try:
        return decode(body, kind)
    except msgspec.ValidationError as error:
        return str(error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "no JSON"


def whole(body: bytes, kind: type[msgspec.Struct]) -> Any:
    return msgspec.json.decode(body, type=kind)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 32)


@pytest.mark.usefixtures("small_pieces")
def test_pieces_make_the_whole() -> None:
    @settings(max_examples=100, deadline=None)
    @given(PROMPTS | VALUES, st.booleans(), st.sampled_from([None, 1]), st.data())
    def check(prompt: Any, is_ascii: bool, indent: int | None, data: Any) -> None:
        for kind, value in (
            (CompletionBody, {"n": 2, "prompt": prompt, "user": "x" * 20}),
            (ChatBody, {"messages": [{"role": "user", "content": prompt}, {"a": prompt}], "n": 1}),
            (ChatBody, {"messages": prompt}),
        ):
            body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
            assert outcome(pieces.decode_large, body, kind) == outcome(whole, body, kind), body
            place = data.draw(st.integers(0, len(body) - 1))
            byte = data.draw(st.sampled_from(BYTES))
            wrong = body[:place] + byte + body[place + 1 :]
            found, expected = (outcome(f, wrong, kind) for f in (pieces.decode_large, whole))
            if isinstance(expected, str):  # of two faults, another may be found first
                assert isinstance(found, str), wrong
            else:
                assert found == expected, wrong

    check()


@pytest.mark.parametrize(
    "text",
    [
        "\\" * 101,
        '\\"' * 50,
        "\U0001f60a" * 40,
        "\u20ac" * 50,
        "abcdefghijklmn\\\\" * 9,
        "abcdefghijklmno\U0001f60a" * 9,
        "",
    ],
)
@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.usefixtures("small_pieces")
def test_texts_are_cut_between_characters(text: str, is_ascii: bool) -> None:
    for shift in range(32):
        body = json.dumps({"prompt": "x" * shift + text}, ensure_ascii=is_ascii).encode()
        assert pieces.decode_large(body, CompletionBody).prompt == "x" * shift + text


def test_no_piece_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the event loop would wait for it."""
    sizes: list[int] = []
    decode = msgspec.json.decode

    def counted(raw: bytes, **options: Any) -> Any:
        if "Raw" not in str(options):
            sizes.append(len(raw))
        return decode(raw, **options)

    monkeypatch.setattr(pieces.msgspec.json, "decode", counted)
    text = "Word \u20ac \\ " * 200_000
    for value in (
        {"prompt": text},
        {"prompt": [text, "x"]},
        {"prompt": list(range(300_000))},
        {"prompt": [[7] * 300_000, [8] * 300_000]},
    ):
        assert parse(json.dumps(value).encode(), CompletionBody).prompt == value["prompt"]
    messages = [{"role": "user", "content": [{"type": "text", "text": text}]}] * 2
    assert parse(json.dumps({"messages": messages}).encode(), ChatBody).messages == messages
    assert max(sizes) <= pieces.PIECE + 2
