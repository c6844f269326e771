"""`pelton run-batch`: the requests of a file, answered into another one."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pelton.cli.flags import Parser, add_fields, given
from pelton.cli.generate import ENGINE_FIELDS, add_model
from pelton.cli.serve import needs_server_packages
from pelton.config.engine import EngineArgs
from pelton.config.server import ServerArgs

_SERVER_FIELDS = (
    "served_model_name",
    "chat_template_content_format",
    "trust_request_chat_template",
    "max_body_bytes",
)
_TELL_SECONDS = 5.0
_SOME_FAILED = 3


def make_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="pelton run-batch",
        description="Answers OpenAI's batch files: lines with custom_id, method, url and body. "
        "Answers are written as they are done; run again, it goes on where it stopped.",
    )
    add_model(parser)
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, JSONL")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="records, JSONL")
    add_fields(parser, "requests", ServerArgs, _SERVER_FIELDS, takes_many=("served_model_name",))
    add_fields(parser, "engine", EngineArgs, ENGINE_FIELDS)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
    return make_parser().parse(argv)


def run(options: argparse.Namespace) -> int:
    """0 if every line has its answer, 3 if records of some tell of an error."""
    with needs_server_packages("run-batch"):
        local = importlib.import_module("pelton.server.local")
        batch_file = importlib.import_module("pelton.server.batch_file")
    source, target = Path(options.input_file), Path(options.output_file)
    args = ServerArgs(**given(options, _SERVER_FIELDS))
    # What is wrong with the files shows before seconds go into loading.
    left = batch_file.nothing_left(source, target, max_line_bytes=args.max_body_bytes)
    if left is not None:
        _say(f"nothing is left to do: {_words(left)}; {target}")
        return _SOME_FAILED if left.skipped_failed else 0
    engine_args = EngineArgs(**given(options, ["model", *ENGINE_FIELDS]))
    progress, counts = _Progress(), batch_file.Counts()

    async def main() -> None:
        async with local.open_local(engine_args, args) as api:
            await batch_file.run_batch(
                source,
                target,
                api.answer,
                # Twice what the engine runs at a time, so that a next one always waits.
                max_concurrency=2 * api.state.engine.facts.max_num_seqs,
                max_line_bytes=args.max_body_bytes,
                on_record=progress.tell,
                counts=counts,
            )

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        _say(f"interrupted: {_words(counts)}; the same command goes on from there")
        return 130
    _say(f"{_words(counts)}; {target}")
    return _SOME_FAILED if counts.failed or counts.skipped_failed else 0


class _Progress:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, counts: Any) -> None:
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._told = time.monotonic()
            _say(f"{_words(counts)} so far")


def _say(words: str) -> None:
    print(f"pelton run-batch: {words}", file=sys.stderr)


def _words(counts: Any) -> str:
    before = f", {counts.skipped_failed} of them with an error" if counts.skipped_failed else ""
    return (
        f"{counts.answered} answered, {counts.failed} with an error, "
        f"{counts.skipped} were there already{before}"
    )
