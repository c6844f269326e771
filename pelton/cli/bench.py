"""`pelton bench KIND`: flags here, measuring in pelton/bench."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from pelton.bench.options import (
    EmbedOptions,
    HostOptions,
    LatencyOptions,
    ModesOptions,
    OffloadingOptions,
    OverheadOptions,
    ServingOptions,
    SpeculationOptions,
    StagingOptions,
    SuiteOptions,
    ThroughputOptions,
)
from pelton.cli.flags import Parser, add_fields, did_you_mean, field_names, given
from pelton.cli.generate import ENGINE_FIELDS, add_model
from pelton.config.engine import EngineArgs

# name -> (options, "module:function" of (EngineArgs, options), summary); the function of what has
# no engine of its own takes no EngineArgs.
KINDS: dict[str, tuple[type[Any], str, str]] = {
    "suite": (SuiteOptions, "pelton.bench.suite.run:run", "a device, beside what others reach"),
    "latency": (LatencyOptions, "pelton.bench.latency:run", "one batch: prefill and decode time"),
    "throughput": (ThroughputOptions, "pelton.bench.throughput:run", "many requests: tokens/s"),
    "embed": (EmbedOptions, "pelton.bench.embed:run", "texts that become vectors: texts/s"),
    "speculation": (
        SpeculationOptions,
        "pelton.bench.speculation:run",
        "one answer to a text, with drafts and without",
    ),
    "offloading": (
        OffloadingOptions,
        "pelton.bench.offloading:run",
        "preempted requests, with host memory for their KV and without",
    ),
    "host": (
        HostOptions,
        "pelton.bench.host:run",
        "the host's microseconds per decode step, no kernel run",
    ),
    "staging": (
        StagingOptions,
        "pelton.bench.staging:run",
        "the way of tokens from the host to the device",
    ),
    "modes": (
        ModesOptions,
        "pelton.bench.modes:run",
        "decode steps with each way of the host's memory to the device",
    ),
    "serve": (ServingOptions, "pelton.bench.serving:run", "a running server, of any make"),
    "overhead": (
        OverheadOptions,
        "pelton.bench.overhead:run",
        "what serving costs: `pelton serve`, and the engine alone",
    ),
}
_WITHOUT_ENGINE = ("serve", "staging")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of `pelton bench KIND`; exits on a wrong one."""
    kind = argv[0] if argv else ""
    if kind not in KINDS:
        rows = "\n".join(f"  {name:10}  {text}" for name, (_, _, text) in KINDS.items())
        usage = f"usage: pelton bench KIND [MODEL] ...\n\nkinds:\n{rows}"
        if kind in ("-h", "--help"):
            print(usage)
            sys.exit(0)
        hint = did_you_mean(kind, KINDS) or f"; there are: {', '.join(KINDS)}"
        print(f"pelton bench: unknown kind {kind!r}{hint}" if kind else usage, file=sys.stderr)
        sys.exit(2)
    options = make_parser(kind).parse(argv[1:])
    options.kind = kind
    return options


def make_parser(kind: str) -> Parser:
    """The flags of `pelton bench KIND`."""
    options_type, _, text = KINDS[kind]
    if kind in _WITHOUT_ENGINE:
        parser = Parser(prog=f"pelton bench {kind}", description=f"Measures {text}.")
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        add_fields(parser, kind, options_type, field_names(options_type))
        return parser
    parser = Parser(
        prog=f"pelton bench {kind}",
        description=f"Measures {text}. Greedy, ends ignored, random token ids unless said "
        "otherwise; the prefix cache is off unless --enable-prefix-caching.",
    )
    add_model(parser)
    add_fields(parser, kind, options_type, field_names(options_type))
    add_fields(parser, "engine", EngineArgs, ENGINE_FIELDS)
    return parser


def run(options: argparse.Namespace) -> int:
    """Measures, prints, and writes the result file if one is named."""
    options_type, target, _ = KINDS[options.kind]
    chosen = options_type(**given(options, field_names(options_type)))
    module, function = target.split(":")
    measure = getattr(importlib.import_module(module), function)
    if options.kind in _WITHOUT_ENGINE:
        measure(chosen)
        return 0
    engine = {"enable_prefix_caching": False, **given(options, ["model", *ENGINE_FIELDS])}
    measure(EngineArgs(**engine), chosen)
    return 0
