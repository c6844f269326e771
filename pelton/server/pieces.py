"""JSON of megabytes, decoded piece by piece: a decoder holds up all other Python threads until it
returns, so none is given more than a few milliseconds of work."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import Raw

Kind = TypeVar("Kind", bound=msgspec.Struct)

PIECE = 256 * 1024
"""Bytes that are decoded at a time, about 1 ms."""

_CUT_FIELDS = {"prompt": b'""', "input": b'""', "messages": b"[{}]", "documents": b"[{}]"}
"""Those that are long because people write much, and what stands for them meanwhile."""
_MAX_DEPTH = 5  # messages, one of them, its content, a part of that, its text
_ENDS = (b'",', b"},", b"],")
_MAX_ITEMS = 50_000
"""Of a list that is taken apart: of more, none is long, and taking it apart would take longer."""
_LONGEST_ESCAPE = 12  # a pair of surrogates


def decode_large(body: bytes, kind: type[Kind]) -> Kind:
    """As `msgspec.json.decode(body, type=kind)`, exceptions included."""
    fields = {name: bytes(raw) for name, raw in _shallow(body, dict[str, Raw]).items()}
    hints = {field.name: field.type for field in msgspec.structs.fields(kind)}
    cut = {
        name: fields.pop(name)
        for name in _CUT_FIELDS
        if name in hints and len(fields.get(name, b"")) > PIECE
    }
    shown = {**fields, **{name: _CUT_FIELDS[name] for name in cut}}
    rest = b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in shown.items())
    decoded = msgspec.json.decode(b"{" + rest + b"}", type=kind)
    for name, raw in cut.items():
        try:
            setattr(decoded, name, msgspec.convert(_value(raw, 1), hints[name]))
        except msgspec.ValidationError as error:
            where = str(error) if "`$" in str(error) else f"{error} - at `$`"
            raise msgspec.ValidationError(where.replace("`$", f"`$.{name}", 1)) from None
        except msgspec.DecodeError as error:
            what = str(error).partition(" (byte")[0]  # of a piece
            raise msgspec.DecodeError(f"{what}, in {name}") from None
    return decoded


def _shallow(raw: bytes, kind: type[Any]) -> Any:
    """Of a container, what stands in it, not decoded, but known to be JSON but for what stands in
    texts: ten times faster."""
    return msgspec.json.decode(raw, type=kind)


def _value(raw: bytes, depth: int) -> Any:
    raw = raw.strip()
    if len(raw) > PIECE and depth <= _MAX_DEPTH:
        first = raw[:1]
        if first == b'"':
            return _text(raw)
        if first == b"{":
            fields = _shallow(raw, dict[str, Raw])
            return {name: _value(bytes(item), depth + 1) for name, item in fields.items()}
        if first == b"[" and raw[1:64].lstrip()[:1] in (b"[", b'"', b"{"):
            if sum(map(raw.count, _ENDS)) > _MAX_ITEMS:
                return msgspec.json.decode(raw)
            return [_value(bytes(item), depth + 1) for item in _shallow(raw, list[Raw])]
        if first == b"[" and raw.translate(None, b"0123456789-, \t\r\n") == b"[]":
            return _numbers(raw)
    return msgspec.json.decode(raw)


def _text(raw: bytes) -> str:
    pieces, start, end = [], 1, len(raw) - 1
    while start < end:
        cut = _cut_of_text(raw, start, end)
        pieces.append(msgspec.json.decode(b'"' + raw[start:cut] + b'"', type=str))
        start = cut
    return "".join(pieces)


def _cut_of_text(raw: bytes, start: int, end: int) -> int:
    """Where a piece that begins at `start` may end: between two characters, however written."""
    cut = start + PIECE
    if cut >= end:
        return end
    last = raw.rfind(b"\\", cut - _LONGEST_ESCAPE, cut)
    if last < 0:
        while raw[cut] & 0xC0 == 0x80:  # in the midst of UTF-8
            cut -= 1
        return cut
    run = raw[start : last + 1]
    if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:
        return last + 1  # after escaped backslashes
    if raw[last + 1 : last + 2] == b"u" and raw[last + 2 : last + 4].lower() in _LOW:
        return last - 6  # before both surrogates
    return last


_LOW = (b"dc", b"dd", b"de", b"df")


def _numbers(raw: bytes) -> list[Any]:
    numbers: list[Any] = []
    start, end = 1, len(raw) - 1
    while start < end:
        cut = end if start + PIECE >= end else raw.rfind(b",", start, start + PIECE)
        cut = end if cut < 0 else cut
        numbers += msgspec.json.decode(b"[" + raw[start:cut] + b"]")
        start = cut + 1
    return numbers
