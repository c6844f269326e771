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


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
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
    return parser.parse(argv)


def run(options: argparse.Namespace) -> int:
    """0 if every line has its record, even one that tells of an error."""
    with needs_server_packages("run-batch"):
        local = importlib.import_module("pelton.server.local")
        batch_file = importlib.import_module("pelton.server.batch_file")
    source, target = Path(options.input_file), Path(options.output_file)
    # What is wrong with the files shows before seconds go into loading.
    with batch_file.open_source(source, target), batch_file.Records(target):
        pass
    args = ServerArgs(**given(options, _SERVER_FIELDS))
    engine_args = EngineArgs(**given(options, ["model", *ENGINE_FIELDS]))
    progress = _Progress()

    async def main() -> Any:
        async with local.open_local(engine_args, args) as api:
            return await batch_file.run_batch(
                source,
                target,
                api.answer,
                # Twice what the engine runs at a time, so that a next one always waits.
                max_concurrency=2 * api.state.engine.config.scheduler.max_num_seqs,
                max_line_bytes=args.max_body_bytes,
                on_record=progress.tell,
            )

    counts = asyncio.run(main())
    print(f"pelton run-batch: {_words(counts)}; {target}", file=sys.stderr)
    return 0


class _Progress:
    """A line on standard error now and then."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, counts: Any) -> None:
        if time.monotonic() - self._told > _TELL_SECONDS:
            self._told = time.monotonic()
            print(f"pelton run-batch: {_words(counts)} so far", file=sys.stderr)


def _words(counts: Any) -> str:
    return (
        f"{counts.answered} answered, {counts.failed} with an error, "
        f"{counts.skipped} were there already"
    )
