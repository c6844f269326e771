"""Sizes as people write them: 32k tokens, 4GiB of memory. A field whose type is `Tokens` or `Bytes`
takes them wherever it is given: as a flag, in a file, in Python."""

from __future__ import annotations

import dataclasses
import re
import typing
from decimal import Decimal
from typing import Annotated, Any

from pelton.errors import ConfigError

Tokens = Annotated[int, "tokens"]
Bytes = Annotated[int, "bytes"]

AUTO = "auto"
"""What leaves a field out that may be left out."""

_TEXT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?) ?([a-zA-Z]*)")
_POWERS = {letter: power for power, letter in enumerate("kmgt", start=1)}
_EXAMPLES = {"tokens": "4096, 32k (32000) or 32K (32768)", "bytes": "4GiB, 4G (the same) or 4GB"}


def unit_of(hint: Any) -> str:
    """ "tokens" or "bytes" if a field of the type `hint` is a size, else "". The type as
    `get_type_hints(..., include_extras=True)` gives it."""
    for member in (hint, *typing.get_args(hint)):
        if typing.get_origin(member) is Annotated:
            return str(typing.get_args(member)[1])
    return ""


def parse_size(text: str, unit: str, *, may_be_left_out: bool = False) -> int | None:
    """A number with a factor behind it or none: as in vLLM k, m, g and t are powers of 1000, and K,
    M, G and T of 1024. Of bytes also kB, MB, GB and TB (1000), and KiB, MiB, GiB and TiB, with or
    without the B (1024). "auto" is None, where a field may be left out.

    Raises ValueError, whose words continue the field's name.
    """
    if may_be_left_out and text == AUTO:
        return None
    found = _TEXT.fullmatch(text.strip())
    factor = _factor(found[2], unit) if found else None
    if not found or factor is None:
        auto = f", or {AUTO}" if may_be_left_out else ""
        raise ValueError(
            f"must be a number of {unit} such as {_EXAMPLES[unit]}{auto}, got {text!r}"
        )
    value = Decimal(found[1].replace("_", "")) * factor
    if value != int(value):
        raise ValueError(f"must be a whole number of {unit}, and {text!r} is {value.normalize():f}")
    return int(value)


def _factor(word: str, unit: str) -> int | None:
    """None: there is no such factor."""
    letter, rest = word[:1], word[1:]
    if unit == "bytes" and rest.lower() in ("b", "ib", "i"):
        base = 1000 if rest.lower() == "b" else 1024
    elif not word or (word == "B" and unit == "bytes"):
        return 1
    else:
        base = 1000 if letter.islower() else 1024
        if rest:
            return None
    power = _POWERS.get(letter.lower())
    return None if power is None else base**power


def read_sizes(args: Any) -> None:
    """Turns the texts in the size fields of a dataclass, which may be frozen, into numbers, and
    "auto" into None where a field may be left out. Other values stay for whoever checks them.

    Raises ConfigError.
    """
    hints = typing.get_type_hints(type(args), include_extras=True)
    for field in dataclasses.fields(args):
        unit, value = unit_of(hints[field.name]), getattr(args, field.name)
        if not unit or not isinstance(value, str):
            continue
        try:
            size = parse_size(value, unit, may_be_left_out=field.default is None)
        except ValueError as error:
            raise ConfigError(f"{field.name} {error}.") from None
        object.__setattr__(args, field.name, size)
