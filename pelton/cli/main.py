"""The `pelton` command: finds the subcommand, and turns exceptions into sentences and exit codes.

Exit codes: 0 done; 1 the engine failed; 2 the user asked for something impossible; 3 done,
but some requests of a batch failed; 130 Ctrl-C.
Loads nothing heavy: torch costs seconds, and `pelton --help` must answer at once.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import pelton
from pelton.cli.flags import did_you_mean
from pelton.config.reasons import reason_of
from pelton.errors import ConfigError, PeltonError, RequestError

# name -> (module with parse(argv) and run(options), summary)
COMMANDS = {
    "generate": ("pelton.cli.generate", "continue prompts, once"),
    "serve": ("pelton.cli.serve", "serve a model by OpenAI's API"),
    "chat": ("pelton.cli.chat", "talk to a model in this terminal"),
    "complete": ("pelton.cli.complete", "continue texts in this terminal"),
    "embed": ("pelton.cli.embed", "make vectors of texts"),
    "run-batch": ("pelton.cli.run_batch", "answer the requests of an OpenAI batch file"),
    "bench": ("pelton.cli.bench", "measure latency or throughput on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pelton ARGV...` (default: the process's arguments) and returns its exit code."""
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Here, not at the interpreter's exit, where nobody could catch what it raises.
            sys.stdout.flush()
            _give_up_lost_lines()
    except BrokenPipeError:
        # The reader of our output left (`| head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _give_up_lost_lines() -> None:
    """Where standard error cannot be written, on a full disk, its lines are lost and nothing else:
    with some of them left, Python would end with code 120, whatever the command's own is."""
    if sys.stderr is None:  # closed by who started us
        return
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"pelton {pelton.__version__}")
        return 0
    if words[0] not in COMMANDS:
        hint = did_you_mean(words[0], COMMANDS) or f"; there are: {', '.join(COMMANDS)}"
        print(f"pelton: unknown command {words[0]!r}{hint.rstrip('.')}", file=sys.stderr)
        return 2
    return _run(COMMANDS[words[0]][0], words[1:])


def _run(module_name: str, argv: Sequence[str]) -> int:
    module = importlib.import_module(module_name)
    options = module.parse(argv)
    try:
        return int(module.run(options))
    except KeyboardInterrupt:
        print("pelton: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        is_users = isinstance(error, (ConfigError, RequestError))
        hint = "" if is_users or options.debug else " (--debug shows where)"
        print(f"pelton: {_words(error)}{hint}", file=sys.stderr)
        return 2 if is_users else 1


def _words(error: Exception) -> str:
    if isinstance(error, PeltonError):
        return str(error)
    if isinstance(error, OSError):
        file = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return f"{file}{reason_of(error)}."
    return f"{type(error).__name__}: {error}"


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: pelton COMMAND ...\n\n"
        f"{pelton.__doc__}\n\ncommands:\n{rows}\n\n"
        "`pelton COMMAND --help` lists a command's flags; `pelton --version` prints the version."
    )


if __name__ == "__main__":
    sys.exit(main())
