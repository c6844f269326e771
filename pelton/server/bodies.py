"""Request bodies: read piece by piece up to a limit, and parsed beside the event loop if large."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from pelton.config.names import near_name
from pelton.config.server import ServerArgs
from pelton.errors import RequestError
from pelton.server.errors import ApiError
from pelton.server.pieces import decode_large

Kind = TypeVar("Kind", bound=msgspec.Struct)
Result = TypeVar("Result")

MAX_COMMAS = 2_000_000
"""Of a body. Lists take memory, and time of everybody while they are made; more token ids than this
fit no context."""

_SMALL = 16 * 1024  # bytes that are parsed sooner than another thread would wake up
_LARGE = 2**20  # bytes; fewer are parsed in 10 ms at most
_large = threading.Lock()
"""Large bodies are parsed one at a time: with several threads at it, the event loop, when it wants
to go on, would often lose to the next of them."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?", re.DOTALL)
_WRONG = re.compile(r"(.*) - at `\$\.?(.*)`", re.DOTALL)
_TYPES = re.compile(r"Expected `(.*)`, got `(.*)`")
_TOO_SHORT = re.compile(r"Expected `array` of length >= (\d+)")
_TYPE_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_HALF = re.compile("[\ud800-\udfff]")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_MAX_SHOWN = 60  # characters
_MISSING = re.compile(r"Object missing required field `(.*)`")


async def read_body(request: Request, args: ServerArgs) -> bytes:
    """The whole body. Raises ApiError: 415 for what is not JSON as it is, 413 for more than
    `max_body_bytes`, as soon as that is known, 408 after `body_timeout`; ClientDisconnect."""
    limit, seconds = args.max_body_bytes, args.body_timeout
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and "+json" in kind):
        raise ApiError(
            415, f"The body must have Content-Type: application/json, got {kind[:100] or 'none'}."
        )
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"The body must come as it is, without Content-Encoding, got {coding[:100]}.",
            headers={"Accept-Encoding": "identity"},
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise too_large(limit)
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {seconds:g} s (--body-timeout)."
        ) from None
    return b"".join(pieces)


def too_large(limit: int) -> ApiError:
    """413."""
    return ApiError(413, f"The body may have {limit} bytes (--max-body-bytes).")


async def beside_loop(
    pool: Executor, is_small: bool, function: Callable[..., Result], *arguments: Any
) -> Result:
    """function(*arguments), in a thread of `pool` unless the work is small."""
    if is_small:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


async def parse_body(pool: Executor, body: bytes, kind: type[Kind]) -> Kind:
    """Raises RequestError naming the field for JSON that is malformed or no `kind`."""
    return await beside_loop(pool, len(body) <= _SMALL, parse, body, kind)


def parse(body: bytes, kind: type[Kind]) -> Kind:
    """As `parse_body`, at once."""
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        raise RequestError(f"The body may hold {MAX_COMMAS} commas, and has more.")
    try:
        try:
            return _decode(body, kind)
        except msgspec.ValidationError as error:
            if not _UNKNOWN.fullmatch(str(error)):
                raise
            return _decode(_without_nulls(body, kind), kind)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _no_json(body, error) from None
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None


def _decode(body: bytes, kind: type[Kind]) -> Kind:
    if len(body) <= _LARGE:
        return msgspec.json.decode(body, type=kind)
    with _large:
        return decode_large(body, kind)


def _without_nulls(body: bytes, kind: type[msgspec.Struct]) -> bytes:
    """Without the fields that `kind` does not have and that are null: clients fill those in whose
    list of fields is longer, and ask for nothing."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    known = kind.__struct_fields__
    return msgspec.json.encode(
        {name: raw for name, raw in fields.items() if name in known or bytes(raw) != b"null"}
    )


def _wrong_field(message: str, kind: type[msgspec.Struct], body: bytes) -> RequestError:
    """In terms of the field, what msgspec says of a path."""
    if unknown := _UNKNOWN.fullmatch(message):
        name, where = unknown[1][:100], unknown[2]
        known = [] if where else [field.name for field in msgspec.structs.fields(kind)]
        near = near_name(name, known)
        hint = f" Did you mean {near!r}?" if near else ""
        full = f"{where}.{name}" if where else name
        return RequestError(f"{full} is not a field that is known here.{hint}", field=full)
    if missing := _MISSING.match(message):
        return RequestError(f"{missing[1]} is missing.", field=missing[1])
    if wrong := _WRONG.fullmatch(message):
        field = wrong[2].removesuffix("[...]")
        subject = field if field == wrong[2] else f"Each value of {field}"
        if wrong[1].startswith("Invalid enum value") and (words := _choices(kind, field)):
            shown = wrong[1].removeprefix("Invalid enum value ")
            return RequestError(f"{subject} must be {words}, got {shown}.", field=field)
        shown = _shown(body, wrong[2])
        return RequestError(_sentence(subject, wrong[1], shown), field=field or None)
    return RequestError(_sentence("", message, ""))


def _choices(kind: type[msgspec.Struct], field: str) -> str:
    """The values that a field of `kind` may have, if it has a list of them; else ""."""
    for known in msgspec.structs.fields(kind):
        if known.name == field:
            info = msgspec.inspect.type_info(known.type)
            types = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
            return " or ".join(
                repr(value)
                for one in types
                if isinstance(one, msgspec.inspect.LiteralType)
                for value in one.values
            )
    return ""


def _no_json(body: bytes, error: Exception) -> RequestError:
    """What is wrong with a body that the parser does not take."""
    if len(body) <= _LARGE:
        with contextlib.suppress(ValueError, RecursionError):
            text = json.dumps(json.loads(body), ensure_ascii=False)
            if half := _HALF.search(text):
                return RequestError(
                    f"The body holds \\u{ord(half[0]):04x}, half of a surrogate pair, without its "
                    "other half: it is no character."
                )
    return RequestError(f"The body is not valid JSON: {error}.")


def _sentence(subject: str, what: str, shown: str) -> str:
    """ "Expected `int | null`, got `str`" as a sentence about a field and its value, if that is
    `shown`."""
    subject = subject or "The body"
    if short := _TOO_SHORT.fullmatch(what):
        return f"{subject} must have at least {short[1]} entry, got none."
    if types := _TYPES.fullmatch(what):
        words = [_TYPE_WORDS.get(word, word) for word in types[1].split(" | ") if word != "null"]
        got = shown or _TYPE_WORDS.get(types[2], types[2])
        return f"{subject} must be {' or '.join(words) or 'null'}, got {got}."
    what = what.replace("`", "")
    return f"{subject}: {what[:1].lower()}{what[1:]}."


def _shown(body: bytes, path: str) -> str:
    """The value at a path such as "stop[0]", cut short; "" where it has none that is short."""
    if len(body) > _SMALL or "[...]" in path:
        return ""
    with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
        value = json.loads(body)
        for name, index in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
        if not isinstance(value, (dict, list)):
            text = json.dumps(value, ensure_ascii=False)
            return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
    return ""
