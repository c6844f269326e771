"""`pelton serve`: a model behind OpenAI's API."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pelton.cli.config_file import read_config
from pelton.cli.flags import Parser, add_fields, field_names, given
from pelton.cli.generate import ENGINE_FIELDS, add_model
from pelton.config.engine import EngineArgs
from pelton.config.server import ServerArgs
from pelton.errors import ConfigError, EngineDead

SERVER_FIELDS = field_names(ServerArgs)


def make_parser() -> Parser:
    """The command's flags."""
    parser = Parser(prog="pelton serve", description="Serves a model by OpenAI's API.")
    add_model(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="flags as YAML, one `flag: value` a line; those given on the command line win",
    )
    add_fields(parser, "server", ServerArgs, SERVER_FIELDS, takes_many=("served_model_name",))
    add_fields(parser, "engine", EngineArgs, ENGINE_FIELDS)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command; exits on a wrong one."""
    return make_parser().parse(argv)


def run(options: argparse.Namespace) -> int:
    """Serves until it is stopped. 0 after that, 1 if the engine has died, 130 if it was stopped
    while something was left to do."""
    values = given(options, ["model", *SERVER_FIELDS, *ENGINE_FIELDS])
    if options.config is not None:
        known = ["model", *SERVER_FIELDS, *ENGINE_FIELDS]
        values = {**_without_open_keys(read_config(options.config, known)), **values}
    server_args = ServerArgs(**_only(values, SERVER_FIELDS))
    engine_args = EngineArgs(**_only(values, ["model", *ENGINE_FIELDS]))
    with needs_server_packages("serve"):
        # By name: `--help` must not wait for it.
        serve = importlib.import_module("pelton.server.serve").serve
    try:
        return int(serve(engine_args, server_args))
    except EngineDead as error:
        print(f"pelton serve: {error}", file=sys.stderr)
        if error.child_traceback:
            print(error.child_traceback.rstrip(), file=sys.stderr, flush=True)
        return 1


@contextlib.contextmanager
def needs_server_packages(command: str) -> Iterator[None]:
    """Imports within it may lack what the extra `server` installs; then ConfigError says so."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("pelton"):
            raise
        raise ConfigError(
            f"`pelton {command}` needs {error.name}: python -m pip install 'pelton[server]'."
        ) from None


def _without_open_keys(values: dict[str, Any]) -> dict[str, Any]:
    """A line `api_key:` without a value is null in YAML, and null would mean: open to all."""
    for name in ("api_key", "api_key_file"):
        if name in values and values[name] is None:
            values[name] = ""
    return values


def _only(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    lists = ("served_model_name", "api_key", "allowed_origins")
    return {
        # In YAML a list of one is easily written without its dash.
        name: [value] if name in lists and isinstance(value, str) else value
        for name, value in values.items()
        if name in names
    }
