"""The tables of flags in docs/cli, made of the commands' parsers: `python -m pelton.cli.reference`
writes them anew between the marks in each page (scripts/lint does), and a test says when they are
old."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pelton.cli import bench, chat, complete, embed, generate, run_batch, serve
from pelton.cli.flags import Parser, add_fields
from pelton.config.engine import EngineArgs

_ENGINE_PAGE = "engine_flags.md"
_MARKED = re.compile(r"(<!-- flags of ([a-z -]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _engine_parser() -> Parser:
    parser = Parser(prog="engine", add_help=False)
    add_fields(parser, "engine", EngineArgs, generate.ENGINE_FIELDS)
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "the engine": _engine_parser,
    "pelton generate": generate.make_parser,
    "pelton serve": serve.make_parser,
    "pelton chat": chat.make_parser,
    "pelton complete": complete.make_parser,
    "pelton embed": embed.make_parser,
    "pelton run-batch": run_batch.make_parser,
    **{f"pelton bench {kind}": partial(bench.make_parser, kind) for kind in bench.KINDS},
}


def with_tables(page: str) -> str:
    """The text of a page, with new tables between its marks: "<!-- flags of pelton serve -->" and
    "<!-- end -->". Raises KeyError for a command that there is not."""
    return _MARKED.sub(lambda found: found[1] + _tables(found[2]) + found[3], page)


def commands_in(page: str) -> list[str]:
    """Whose flags a page tells."""
    return [command for _, command, _ in _MARKED.findall(page)]


def _tables(command: str) -> str:
    first: list[argparse.Action] = []
    parts = []
    for group in PARSERS[command]()._action_groups:
        actions = [a for a in group._group_actions if not isinstance(a, argparse._HelpAction)]
        title = group.title or ""
        if title in ("positional arguments", "options") or command == "the engine":
            first += actions
        elif title.startswith("engine"):
            names = {action.dest for action in actions}
            missing = [name for name in generate.ENGINE_FIELDS if name not in names]
            but = "".join(f", but `--{name.replace('_', '-')}`" for name in missing)
            parts.append(f"And the [flags of the engine]({_ENGINE_PAGE}){but}.\n")
        else:
            parts.append(f"{title[0].upper()}{title[1:]}:\n\n{_table(actions)}")
    return "\n" + "\n".join([_table(first), *parts]) + "\n"


def _table(actions: list[argparse.Action]) -> str:
    rows = ["| flag | |", "|---|---|"]
    for action in actions:
        words = action.option_strings or [str(action.metavar)]
        value = f" {action.metavar}" if action.option_strings and action.metavar else ""
        names = ", ".join(f"`{word}{value}`" for word in words)
        text = (action.help or "").replace("%%", "%").replace("|", "\\|")
        rows.append(f"| {names} | {text} |")
    return "\n".join(rows) + "\n"


def main(folder: str) -> None:
    """Writes the pages of a folder that are old."""
    for file in sorted(Path(folder).glob("*.md")):
        page = file.read_text(encoding="utf-8")
        if (new := with_tables(page)) != page:
            file.write_text(new, encoding="utf-8")
            print(f"{file} is new")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs/cli")
