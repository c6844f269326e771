"""Flags made from dataclass fields."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import pytest

from pelton.cli.flags import Parser, add_fields, field_names, given
from pelton.config.engine import EngineArgs


@dataclass(kw_only=True)
class Args:
    """What a test asks.

    max_len: the longest thing,
        at 100% of its length.
    left / right: a side.
    """

    max_len: int | None = None
    share: float = 0.5
    name: str = "x"
    left: bool = False
    right: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    stop: str | list[str] | tuple[str, ...] | None = None
    ids: list[int] | None = None
    names: list[str] | None = None
    which: dict[str, Any] | list[str] | None = None


def _parse(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="test")
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS)
    add_fields(parser, "args", Args, field_names(Args), takes_many=("names",))
    return given(parser.parse(argv), field_names(Args))


def test_only_what_is_given_comes_back() -> None:
    assert _parse() == {}
    assert _parse("--share", "0.25") == {"share": 0.25}


def test_every_kind_of_field() -> None:
    words = "--max-len 3 --name y --left --no-right --stop a --stop b --ids 1 --ids 2".split()
    assert _parse(*words, "--extra", '{"a": [1]}') == {
        "max_len": 3,
        "name": "y",
        "left": True,
        "right": False,
        "stop": ["a", "b"],
        "ids": [1, 2],
        "extra": {"a": [1]},
    }


def test_several_words_behind_one_flag() -> None:
    assert _parse("m", "--names", "a", "b", "--names", "c") == {"names": ["a", "b", "c"]}
    assert _parse("--names", "a", "--names", "b") == {"names": ["a", "b"]}
    assert _parse("--names", "a", "--share", "1", "m") == {"names": ["a"], "share": 1.0}


def test_a_list_or_an_object() -> None:
    for text, value in (
        ('{"a": {"x": 1}}', {"a": {"x": 1}}),
        ('["a", "b"]', ["a", "b"]),
        ("a", ["a"]),
    ):
        assert _parse("--which", text) == {"which": value}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--names", "a", "m"], "--names takes all words that follow it, and none is left for"),
        (["--which", "[1]"], "--which: must be a JSON list of strings, got '[1]'"),
        (["--which", "["], "--which: must be a JSON object or list, but"),
        (["--max-ln", "3"], "unknown flag --max-ln; did you mean --max-len?"),
        (["--max_len", "3"], "unknown flag --max_len; did you mean --max-len?"),
        (["--max-ln=3"], "unknown flag --max-ln; did you mean --max-len?"),
        (["--qqqq"], "unknown flag --qqqq."),
        (["--max", "3"], "unknown flag --max"),
        (["--model", "m"], "the model is given without a flag"),
        (["one", "two"], "unexpected argument 'two'"),
        (["--max-len", "3.5"], "--max-len: must be an integer, got '3.5'"),
        (["--share", "much"], "--share: must be a number, got 'much'"),
        (["--extra", "[1]"], "--extra: must be a JSON object, got '[1]'"),
        (["--extra", "{"], "--extra: must be a JSON object, but"),
    ],
)
def test_mistakes_are_answered_with_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _parse(*words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_help_comes_from_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-len N the longest thing, at 100% of its length." in text
    assert text.count("a side. (default:") == 2
    assert "(default: 0.5)" in text


def test_threads_has_a_shorter_name():
    parser = Parser(prog="x")
    add_fields(parser, "engine", EngineArgs, ["num_threads"])
    for flag in ("--threads", "--num-threads"):
        assert given(parser.parse([flag, "3"]), ["num_threads"]) == {"num_threads": 3}
