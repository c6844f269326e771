"""Command-line flags made from the fields of a dataclass, so that each name exists once.

`max_num_seqs: int | None` becomes `--max-num-seqs N`, `Tokens` and `Bytes` take sizes, a bool
becomes `--x / --no-x`, a dict takes JSON, a list may be repeated. Help comes from the class's
docstring (lines "name: text"). A flag that is not given is left out of the result, so defaults also
exist once: in the dataclass.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pelton.config.docs import field_texts
from pelton.config.names import near_name
from pelton.config.sizes import parse_size, unit_of


class Parser(argparse.ArgumentParser):
    """argparse that answers a mistake with one sentence, and knows what was probably meant.

    Exits with status 2 on a wrong flag or value, 0 after --help.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Abbreviations would make every new flag a possible break of somebody's script.
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        print(f"{self.prog}: {message}{end} See {self.prog} --help.", file=sys.stderr)
        sys.exit(2)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Like parse_args, with a suggestion for an unknown flag."""
        # First, since a mistyped flag is often what then seems to be missing.
        for word in argv[: argv.index("--") if "--" in argv else None]:
            name = word.split("=")[0]
            if name.startswith("--") and " " not in word and not self._knows(name):
                self._refuse_flag(name)
        options, unknown = self.parse_known_args(argv)
        flag = options.__dict__.pop(_MANY, None)
        if flag is not None and not hasattr(options, "model"):
            self.error(
                f"{flag} takes all words that follow it, and none is left for MODEL; put MODEL "
                f"first, or write {flag} before each of its words"
            )
        if not unknown:
            return options
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        self._refuse_flag(word)

    def _knows(self, name: str) -> bool:
        return name in self._option_string_actions

    def _refuse_flag(self, name: str) -> NoReturn:
        if name == "--model":
            self.error(f"the model is given without a flag, as in `{self.prog} MODEL`")
        self.error(f"unknown flag {name}{did_you_mean(name, self._option_string_actions)}")


_MANY = "flag that took several words"


class _ManyWords(argparse.Action):
    """Adds words to a list. Which flag took several at once is noted: one of them may have been
    meant as the model."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])
        if len(values) > 1:
            setattr(namespace, _MANY, option_string)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: "; did you mean X?", or nothing if no word of `known` is near."""
    near = near_name(word.replace("_", "-"), known)
    return f"; did you mean {near}?" if near else ""


def field_names(kind: type) -> list[str]:
    """Names of the fields of a dataclass, in order."""
    return [field.name for field in dataclasses.fields(kind)]


# Further names of fields' flags.
_SHORTER = {"num_threads": ("--threads",)}


def add_fields(
    parser: Parser,
    title: str,
    kind: type,
    names: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    takes_many: Container[str] = (),
) -> None:
    """Adds a flag for each of the fields `names` of the dataclass `kind`, under the heading
    `title`. The help tells the `defaults`: the dataclass's, if they are not given.

    takes_many: lists of which several entries may stand behind one flag.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = field_texts(kind)
    if defaults is None:
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    for name in names:
        text = texts.get(name, "").replace("%", "%%")
        default = defaults.get(name)
        if default not in (None, "", dataclasses.MISSING):
            text = f"{text} (default: {default})".strip()
        group.add_argument(
            "--" + name.replace("_", "-"),
            *_SHORTER.get(name, ()),
            dest=name,
            default=argparse.SUPPRESS,
            help=text,
            **_action(hints[name], takes_many=name in takes_many),
        )


def given(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values among `names` that the user gave."""
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _action(hint: Any, *, takes_many: bool = False) -> dict[str, Any]:
    """What argparse must know of a field's type."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    members = [m for m in typing.get_args(hint) if m is not type(None)] if is_union else [hint]
    kinds = [typing.get_origin(member) for member in members]
    if dict in kinds:
        return {"type": _json_value if list in kinds else _json_object, "metavar": "JSON"}
    for member in members:
        if typing.get_origin(member) is list:
            how = {"action": _ManyWords, "nargs": "+"} if takes_many else {"action": "append"}
            return {**how, **_action(typing.get_args(member)[0])}
    if unit := unit_of(hint):
        return {"type": _size(unit, may_be_left_out=is_union), "metavar": "SIZE"}
    (member,) = members
    if member is bool:
        return {"action": argparse.BooleanOptionalAction}
    converter, metavar = _CONVERTERS[member]
    return {"type": converter, "metavar": metavar}


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None


def _size(unit: str, *, may_be_left_out: bool) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        try:
            return parse_size(text, unit, may_be_left_out=may_be_left_out)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, but {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _json_value(text: str) -> Any:
    """An object, a list of strings, or a bare word as the only one of the list."""
    if text[:1] not in ("{", "["):
        return [text]
    if text[0] == "{":
        return _json_object(text)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object or list, but {error}") from None
    if not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"must be a JSON list of strings, got {text!r}")
    return value


_CONVERTERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (_integer, "N"),
    float: (_number, "X"),
    str: (str, "TEXT"),
}
