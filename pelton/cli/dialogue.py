"""What `pelton chat` and `pelton complete` share: flags, typed lines, answers as they come."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.cli.api import Api, OwnApi, add_server, check_server_flags, open_server
from pelton.cli.flags import Parser, add_fields, field_names, given
from pelton.cli.generate import ENGINE_FIELDS, add_model
from pelton.config.engine import EngineArgs
from pelton.config.names import near_name
from pelton.config.params import SamplingParams
from pelton.config.server import ServerArgs
from pelton.errors import EngineDead, EngineError, RequestError

SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_ENGINE_FLAGS = [name for name in ENGINE_FIELDS if name != "seed"]  # the word means the request's
_BLOCK = '"""'
_CONTROLS = {code: None for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
"""What could make a terminal do other things than show text."""

_NOT_SETTINGS = ("messages", "prompt", "model", "stream", "stream_options", "n", "best_of")


def make_parser(prog: str, description: str) -> Parser:
    """Flags that both commands have."""
    parser = Parser(prog=prog, description=description)
    add_model(parser)
    add_server(parser)
    parser.add_argument(
        "-q", "--quick", metavar="TEXT", help="one answer, to this text; - reads standard input"
    )
    parser.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        help="tell tokens and tokens/s of each answer (default: unless -q is given)",
    )
    add_fields(
        parser,
        "sampling (what is not given, the model's generation_config decides)",
        SamplingParams,
        SAMPLING_FIELDS,
        defaults={},
    )
    add_fields(parser, "engine, without --url", EngineArgs, _ENGINE_FLAGS)
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Exits on flags that do not go together."""
    options = parser.parse(argv)
    hint = "; a text for it goes behind -q, or -q - reads it"
    check_server_flags(parser, options, _ENGINE_FLAGS, hint)
    return options


def engine_args(options: argparse.Namespace) -> EngineArgs:
    """Of the engine that is started without --url."""
    return EngineArgs(**given(options, ["model", *_ENGINE_FLAGS]))


@contextlib.contextmanager
def open_api(options: argparse.Namespace, command: str) -> Iterator[Api]:
    """The server of --url, or an engine that ends with the block."""
    api: Api
    if options.url is not None:
        api = open_server(options)
    else:
        begin = time.perf_counter()
        args = engine_args(options)
        if args.model is not None:
            tell(f"loading {args.model}")
        api = OwnApi(args, ServerArgs(), command=command)
        tell(f"{api.model} is ready after {time.perf_counter() - begin:.1f} s.")
    try:
        yield api
    finally:
        api.close()


def tell(text: str) -> None:
    """To the user, apart from answers."""
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Shown:
    """An answer as far as it was shown. finish_reason: "" if it was stopped by Ctrl-C."""

    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    first_seconds: float = 0.0
    seconds: float = 0.0

    def line(self) -> str:
        """Its numbers, for people."""
        if self.usage is None or not self.text:
            return f"[stopped after {self.seconds:.2f} s]"
        num_tokens = self.usage.get("completion_tokens", 0)
        decoding = self.seconds - self.first_seconds
        speed = f", {(num_tokens - 1) / decoding:.1f} tokens/s" if num_tokens > 1 else ""
        return (
            f"[{self.usage.get('prompt_tokens', 0)} + {num_tokens} tokens, first after "
            f"{self.first_seconds:.2f} s{speed}, {self.finish_reason}]"
        )


def show(events: Iterator[dict[str, Any]], text_of: Callable[[dict[str, Any]], str]) -> Shown:
    """Prints an answer as it comes. Ctrl-C ends it, and is not an error."""
    shown, begin = Shown(), time.perf_counter()
    plain = sys.stdout.isatty()
    pieces: list[str] = []
    try:
        for chunk in events:
            shown.usage = chunk.get("usage") or shown.usage
            for choice in chunk.get("choices", ()):
                if piece := text_of(choice):
                    if not pieces:
                        shown.first_seconds = time.perf_counter() - begin
                    pieces.append(piece)
                    sys.stdout.write(piece.translate(_CONTROLS) if plain else piece)
                    sys.stdout.flush()
                shown.finish_reason = choice.get("finish_reason") or shown.finish_reason
    except KeyboardInterrupt:
        shown.finish_reason = ""
    finally:
        if close := getattr(events, "close", None):
            close()
        if pieces:
            sys.stdout.write("\n")
            sys.stdout.flush()
    shown.text = "".join(pieces)
    shown.seconds = time.perf_counter() - begin
    return shown


def read_quick(text: str) -> str:
    """What -q asks: the text, or standard input for "-"."""
    if text != "-":
        return checked_text("--quick", text)
    try:
        return checked_text("standard input", sys.stdin.read())
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input must be text: {error.reason}.") from None


def checked_text(name: str, text: str) -> str:
    """Raises RequestError for bytes that are no text: Python lets them through from a command line,
    and in some locales from standard input, as halves of characters, which no JSON holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{name} must be text: it holds bytes that are no UTF-8.") from None
    return text


class Dialogue:
    """Lines typed, answers shown. Commands are its methods `do_NAME(words)`, whose docstrings are
    their help.

    sampling: fields that go into every request.
    """

    def __init__(self, api: Api, sampling: dict[str, Any], *, shows_stats: bool) -> None:
        self.api = api
        self.sampling = sampling
        self.shows_stats = shows_stats
        self.stopped = False

    def ask(self, text: str) -> None:
        """Shows the answer to what was typed. Raises PeltonError."""
        raise NotImplementedError

    def run(self) -> int:
        """Until /quit, the input's end (Ctrl-D), or a second Ctrl-C. Returns the exit code: 130
        after Ctrl-C, 0 for people, and for a script 1 or 2 if one of its lines had no answer."""
        if sys.stdin.isatty():
            tell(
                f"Talking to {self.api.model}. /help lists commands, {_BLOCK} begins and ends a "
                "block."
            )
        _set_up_history()
        num_interrupts = code = 0
        while True:
            try:
                text = read_text()
            except EOFError:
                if sys.stdin.isatty():
                    tell("")  # or the shell would go on behind our prompt
                    return 0
                return code
            except KeyboardInterrupt:
                num_interrupts += 1
                if num_interrupts == 2:
                    return 130
                tell("\n[Ctrl-C once more ends this]")
                continue
            num_interrupts = 0
            try:
                checked_text("standard input", text)
                if text.startswith("/"):
                    if not self._command(text):
                        return 0
                elif text.strip() and self._answer(text):
                    num_interrupts = 1
            except EngineDead:
                raise
            except (RequestError, EngineError, OSError) as error:
                name = getattr(error, "field", None)
                # Else every further answer would be refused for it.
                hint = f" /set {name}= takes it back." if name in self.sampling else ""
                tell(f"[{error}{hint}]")
                code = max(code, 2 if isinstance(error, RequestError) else 1)

    def _answer(self, text: str) -> bool:
        """Returns whether it was stopped."""
        self.stopped = False
        self.ask(text)
        return self.stopped

    def note(self, shown: Shown) -> None:
        """An answer was shown."""
        self.stopped = not shown.finish_reason
        if self.stopped:
            tell("[stopped; Ctrl-C once more ends this]")
        elif self.shows_stats:
            tell(shown.line())

    def _command(self, text: str) -> bool:
        """Returns False for the end."""
        name, _, words = text[1:].partition(" ")
        if name in ("quit", "exit"):
            no_words(name, words)
            return False
        action = getattr(self, f"do_{name}", None)
        if not name.isidentifier() or action is None:
            tell(f"[/{name} is no command; /help lists them]")
        else:
            action(words.strip())
        return True

    def do_help(self, words: str) -> None:
        """/help  this list"""
        no_words("help", words)
        names = sorted(name for name in dir(self) if name.startswith("do_"))
        tell("\n".join(f"  {getattr(self, name).__doc__}" for name in names))
        tell(f"  /quit  the end, as Ctrl-D\n  {_BLOCK} or a last \\  text of several lines")

    def do_set(self, words: str) -> None:
        """/set temperature=0.7 stop="x"  fields of requests; without a value: the model's own"""
        changed = dict(self.sampling)
        for word in _assignments(words):
            name, is_set, value = word.partition("=")
            if not is_set or not name.isidentifier():
                raise RequestError(f"/set takes name=value, got {word!r}.")
            if value:
                changed[name] = _value(value)
                _check_setting(name, changed[name], self.api.fields)
            else:
                changed.pop(name, None)
        self.sampling = changed
        tell(f"[{json.dumps(self.sampling, ensure_ascii=False)}]")


def no_words(command: str, words: str) -> None:
    """Raises RequestError for words behind a command that takes none."""
    if words.strip():
        raise RequestError(f"/{command} takes no words, got {words.strip()!r}.")


def _check_setting(name: str, value: Any, fields: frozenset[str] | None) -> None:
    """Raises RequestError for what no request may hold. Where only the server knows its `fields`, a
    name that no sampling field is near to is let through: it says so if it does not know it."""
    if name in _NOT_SETTINGS:
        raise RequestError(f"{name} is set by this command itself, and not by /set.")
    known = field_names(SamplingParams)
    if name in known:
        SamplingParams(**{"max_tokens": None, name: value})
    elif near := near_name(name, known):
        raise RequestError(f"{name} is not a field that is known here. Did you mean {near!r}?")
    elif fields is not None and name not in fields:
        raise RequestError(f"{name} is not a field that is known here.")


def _assignments(words: str) -> list[str]:
    """Split where a new `name=` begins."""
    found: list[str] = []
    for word in words.split():
        if not found or (word.partition("=")[0].isidentifier() and "=" in word):
            found.append(word)
        else:
            found[-1] += " " + word
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_text() -> str:
    """What is typed until Enter; a block between triple quotes, or lines that end with a backslash,
    as one text. The end of the input ends them, too. Raises EOFError, KeyboardInterrupt, and
    RequestError for what is no text."""
    line = _read_line(">>> ")
    if line.lstrip().startswith(_BLOCK):
        lines = [line.lstrip().removeprefix(_BLOCK)]
        with contextlib.suppress(EOFError):
            while not lines[-1].rstrip().endswith(_BLOCK):
                lines.append(_read_line("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")
    with contextlib.suppress(EOFError):
        while line.endswith("\\"):
            line = line[:-1] + "\n"
            line += _read_line("... ")
    return line


def _read_line(prompt: str) -> str:
    """Only a person is prompted, and never in the midst of answers that go to a file."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return input(prompt)
    if sys.stdin.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
    try:
        line = sys.stdin.readline()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input must be text: {error.reason}.") from None
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _set_up_history() -> None:
    """Arrow keys, where Python has readline and people type; kept in ~/.pelton_history."""
    if not sys.stdin.isatty():
        return
    try:
        import readline
    except ImportError:
        return
    import atexit

    file = Path.home() / ".pelton_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(1000)

    def save() -> None:
        with contextlib.suppress(OSError):
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else's to read
            readline.write_history_file(file)

    atexit.register(save)
