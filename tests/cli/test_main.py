"""The `pelton` command: dispatch, sentences, exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
from collections.abc import Callable

import pytest

import pelton
from pelton.cli import main as cli
from pelton.errors import ConfigError, EngineError, RequestError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Installs a command called "try" that does what it is given."""

    def install(action: Callable[[], int]) -> None:
        module = types.ModuleType("pelton_try")
        module.parse = lambda argv: argparse.Namespace(debug="--debug" in argv)  # type: ignore[attr-defined]
        module.run = lambda options: action()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pelton_try", module)
        monkeypatch.setitem(cli.COMMANDS, "try", ("pelton_try", "for a test"))

    return install


def _raiser(error: BaseException) -> Callable[[], int]:
    def action() -> int:
        raise error

    return action


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pelton {pelton.__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["genrate"], "did you mean generate?"),
        (["zzz"], "there are: generate, serve"),
        (["bench", "latncy"], "did you mean latency?"),
        (["bench", "zzz"], "there are: suite, latency, throughput"),
    ],
)
def test_unknown_commands_name_the_known_ones(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(words)
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (ConfigError("max_model_len must be 8."), 2, "pelton: max_model_len must be 8.\n"),
        (RequestError("top_p must be 1.", field="top_p"), 2, "pelton: top_p must be 1.\n"),
        (EngineError("It broke."), 1, "pelton: It broke. (--debug shows where)\n"),
        (
            PermissionError(13, "x", "/a/b"),
            1,
            "pelton: /a/b: Permission denied. (--debug shows where)\n",
        ),
        (OSError(28, "x"), 1, "pelton: No space left on device. (--debug shows where)\n"),
        (KeyError("x"), 1, "pelton: KeyError: 'x' (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "pelton: interrupted\n"),
    ],
)
def test_exceptions_become_sentences(
    command: Callable[[Callable[[], int]], None],
    error: BaseException,
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(_raiser(error))
    assert cli.main(["try"]) == code
    assert capsys.readouterr().err == sentence


def test_debug_shows_the_traceback(
    command: Callable[[Callable[[], int]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(_raiser(ConfigError("No.")))
    assert cli.main(["try", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("pelton: No.\n")


def test_the_command_decides_the_exit_code(command: Callable[[Callable[[], int]], None]) -> None:
    command(lambda: 7)
    assert cli.main(["try"]) == 7


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["bench", "--help"]])
def test_a_reader_that_left_is_no_fault(words: list[str]) -> None:
    """`pelton --help | true`: a pipe that is closed before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "pelton.cli.main", *words],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode in (0, 1)  # argparse itself swallows the fault of a long text


def test_lines_that_a_full_disk_lost_do_not_change_the_exit_code(monkeypatch):
    """With some left in a buffer Python would end with 120."""
    with open("/dev/full", "w") as full:
        full.write("lost")
        monkeypatch.setattr(sys, "stderr", full)
        assert cli.main(["--version"]) == 0
        full.write("more")
        full.flush()  # and closing it raises nothing


def test_standard_error_may_be_closed(monkeypatch):
    """By `2>&-`; Python has None in its place."""
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main(["--version"]) == 0
