from __future__ import annotations

import msgspec
import pytest

from pelton.errors import RequestError
from pelton.server import bodies
from pelton.server.bodies import parse
from pelton.server.protocol import (
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    GenerationBody,
    refuse_unsupported,
)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        (b'{"prompt": "x", "temprature": 1}', "temprature", "Did you mean 'temperature'"),
        (b'{"prompt": "x", "zzz": 1}', "zzz", "not a field that is known here.$"),
        (b'{"prompt": "x", "a`b": 1}', "a`b", "a`b"),
        (b'{"prompt": "x", "stop": [1]}', "stop[0]", "stop\\[0\\] must be a string, got 1"),
        (b'{"prompt": "x", "n": 1.5}', "n", "n must be an integer, got 1.5"),
        (b'{"prompt": {}}', "prompt", "prompt must be a string or a list, got an object"),
        (b'{"prompt": [1, null]}', "prompt[1]", "got null"),
        (b'{"prompt": "x", "stream": "yes"}', "stream", 'stream must be true or false, got "yes"'),
        (b'{"prompt": "x", "logit_bias": {"5": "y"}}', "logit_bias", "Each value of logit_bias"),
        (b'{"prompt": "x", "a": null, "n": "1"}', "n", 'n must be an integer, got "1"'),
        (b'{"prompt": "x", "a": null, "b": 0}', "b", "b is not a field"),
        (b"[]", None, "The body must be an object, got a list"),
        (b"{", None, "not valid JSON"),
        (rb'{"prompt": "\ud800"}', None, r"holds \\ud800, half of a surrogate pair"),
        (rb'{"prompt": "\ud83d\ude00 \udc01x"}', None, r"holds \\udc01, half of"),
        (rb'{"prompt": NaN, "stop": "\ud83d\ude00"}', None, "not valid JSON"),
    ],
)
def test_what_is_wrong_is_told(body: bytes, field: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as wrong:
        parse(body, CompletionBody)
    assert wrong.value.field == field


def test_unknown_fields_that_are_null_ask_for_nothing() -> None:
    body = parse(b'{"prompt": "x", "zzz": null, "n": 2, "guided_json": null}', CompletionBody)
    assert (body.prompt, body.n) == ("x", 2)
    chat = parse(b'{"messages": [{}], "zzz" : null }', ChatBody)
    assert chat.messages == [{}]


def test_an_empty_list_is_told() -> None:
    with pytest.raises(RequestError, match="messages must have at least 1 entry, got none"):
        parse(b'{"messages": []}', ChatBody)


def test_no_list_is_made_of_a_body_that_fits_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_COMMAS", 10)
    with pytest.raises(RequestError, match="commas"):
        parse(b'{"prompt": [' + b"1," * 11 + b"1]}", CompletionBody)
    assert parse(b'{"prompt": [' + b"1," * 10 + b"1]}", CompletionBody).prompt == [1] * 11


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields(name: str) -> None:
    """Neutral values are let in, all others refused by name; a field of the table is one of a type
    that is read, so that it is refused with its hint and not as unknown."""
    kinds = [k for k in (ChatBody, CompletionBody) if name in k.__struct_fields__]
    assert kinds
    for kind in kinds:
        first = {"messages": [{}]} if kind is ChatBody else {"prompt": "x"}
        for value in UNSUPPORTED[name].neutral:
            refuse_unsupported(kind(**first, **{name: value}))
        for value in ("something", 7, {"a": 1}):
            with pytest.raises(RequestError, match=f"{name} is not supported") as refusal:
                refuse_unsupported(kind(**first, **{name: value}))
            assert refusal.value.field == name


NEEDS_NOTHING = {
    "metadata": {"project": "x"},
    "prompt_cache_key": "team-7",
    "safety_identifier": "someone",
    "store": False,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_fields_for_which_nothing_need_be_done_are_taken(kind: type[GenerationBody]) -> None:
    first = {"messages": [{}]} if kind is ChatBody else {"prompt": "x"}
    refuse_unsupported(parse(msgspec.json.encode({**first, **NEEDS_NOTHING}), kind))
    options = {**first, "stream": True, "stream_options": {"include_obfuscation": True}}
    with pytest.raises(RequestError, match="include_obfuscation is not supported") as refusal:
        refuse_unsupported(parse(msgspec.json.encode(options), kind))
    assert refusal.value.field == "stream_options.include_obfuscation"
