"""`pelton embed`: texts in, a JSON object with a vector for each out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from pelton.cli.api import add_server, check_server_flags, open_server
from pelton.cli.flags import Parser, add_fields, given
from pelton.cli.generate import ENGINE_FIELDS, add_model
from pelton.config.engine import EngineArgs
from pelton.config.pooling import PoolingParams
from pelton.errors import EngineError, RequestError

_FIELDS = ("dimensions", "truncate_prompt_tokens", "use_activation")
_BATCH = 256
"""Texts that are asked for at a time: what comes from standard input need not end."""

Result = list[float] | Exception
"""A vector, or what is wrong with the text."""


def make_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="pelton embed",
        description="Makes vectors of texts with a model: a server's, or one that is loaded for "
        "it. Writes a line of JSON for each, in their order.",
    )
    add_model(parser)
    parser.add_argument(
        "--text",
        action="append",
        metavar="TEXT",
        help="may be repeated; without it each line of standard input that is not blank is a text",
    )
    add_server(parser)
    add_fields(parser, "vectors", PoolingParams, _FIELDS, defaults={})
    defaults = {field.name: field.default for field in dataclasses.fields(EngineArgs)}
    defaults["runner"] = "pooling"
    add_fields(parser, "engine, without --url", EngineArgs, ENGINE_FIELDS, defaults)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
    parser = make_parser()
    options = parser.parse(argv)
    check_server_flags(parser, options, ENGINE_FIELDS)
    if options.text is None and sys.stdin.isatty():
        parser.error("give --text, or texts as lines of standard input")
    return options


def run(options: argparse.Namespace) -> int:
    """2 if a text was refused, 1 if the engine failed on one."""
    asked = given(options, _FIELDS)
    PoolingParams(**asked)  # what is wrong is told before seconds go into loading
    texts = iter(options.text if options.text is not None else _lines())
    embed = _of_server(options, asked) if options.url is not None else _of_engine(options, asked)
    begin, code, index = time.perf_counter(), 0, 0
    while batch := list(islice(texts, _BATCH)):
        for result in embed(batch):
            line: dict[str, Any] = {"index": index}
            if isinstance(result, Exception):
                line["error"] = str(result)
                print(f"pelton embed: text {index}: {result}", file=sys.stderr)
                code = max(code, 2 if isinstance(result, RequestError) else 1)
            else:
                line["embedding"] = result
            print(json.dumps(line, allow_nan=False))
            index += 1
        sys.stdout.flush()
    seconds = time.perf_counter() - begin
    print(f"{index} texts in {seconds:.2f} s: {index / seconds:.1f} texts/s", file=sys.stderr)
    return code


def _lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            if line.strip():
                yield line.removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input must be text: {error.reason}.") from None


def _of_engine(
    options: argparse.Namespace, asked: dict[str, Any]
) -> Callable[[list[str]], Iterator[Result]]:
    engine = {"runner": "pooling", **given(options, ["model", *ENGINE_FIELDS])}
    # By name, because an import would make torch a part of this module.
    llm = importlib.import_module("pelton.engine.llm").LLM(**engine)
    params = PoolingParams(**asked)

    def embed(texts: list[str]) -> Iterator[Result]:
        try:
            outputs = llm.embed(texts, params, use_tqdm=False)
        except RequestError as error:  # of a lone one
            if len(texts) > 1:
                raise
            yield error
            return
        for output in outputs:
            yield output.outputs.embedding if output.error is None else output.error

    return embed


def _of_server(
    options: argparse.Namespace, asked: dict[str, Any]
) -> Callable[[list[str]], Iterator[Result]]:
    api = open_server(options)

    def embed(texts: list[str]) -> Iterator[Result]:
        try:
            yield from _vectors(api.ask("/v1/embeddings", {"input": texts, **asked}), len(texts))
        except RequestError as error:
            if len(texts) == 1:
                yield error
                return
            # One of them, which the others are not to pay for.
            for text in texts:
                yield from embed([text])

    return embed


def _vectors(answer: dict[str, Any], count: int) -> list[Result]:
    """Raises EngineError for what is no answer to `count` texts."""
    try:
        vectors = [list(map(float, one["embedding"])) for one in answer["data"]]
        assert len(vectors) == count
    except (LookupError, TypeError, ValueError, AssertionError):
        raise EngineError("the server's answer holds no vector for each text.") from None
    return list(vectors)
