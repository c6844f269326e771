"""How a benchmark's result is told: to people as lines, to programs as one JSON object."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pelton.bench.machine import Ceilings, Facts
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.errors import ConfigError

_SECRET = "hf_token"
_SECRET_FLAGS = ("--hf-token", "--api-key")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Of a list of measurements, in their unit; percentiles are interpolated linearly."""

    median: float
    p10: float
    p90: float
    p99: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        p10, median, p90, p99 = np.percentile(values, (10, 50, 90, 99)).tolist()
        low, high = min(values), max(values)
        return cls(median=median, p10=p10, p90=p90, p99=p99, low=low, high=high)

    def line(self, scale: float = 1.0) -> str:
        """For people; values times `scale`."""
        m, a, b, c = (v * scale for v in (self.median, self.p10, self.p90, self.p99))
        return f"median {m:9.2f}   p10 {a:9.2f}   p90 {b:9.2f}   p99 {c:9.2f}"


def command() -> str:
    """The command line of this process, without secrets."""
    words = ["pelton", *sys.argv[1:]]
    for index, word in enumerate(words):
        flag = word.partition("=")[0]
        if flag in _SECRET_FLAGS and "=" in word:
            words[index] = flag + "=..."
        elif index and words[index - 1] in _SECRET_FLAGS:
            words[index] = "..."
    return shlex.join(words)


def context(
    facts: Facts, ceilings: Ceilings, args: EngineArgs, config: EngineConfig, options: Any
) -> dict[str, Any]:
    """Under what circumstances something was measured, JSON-ready; `options` is the benchmark's."""
    return {
        "command": command(),
        "machine": dataclasses.asdict(facts),
        "ceilings": dataclasses.asdict(ceilings),
        "options": dataclasses.asdict(options),
        **engine_context(args, config),
    }


def engine_context(args: EngineArgs, config: EngineConfig) -> dict[str, Any]:
    """What engine was measured, JSON-ready."""
    asked = dataclasses.asdict(args)
    del asked[_SECRET]
    return {
        "engine_args": asked,
        "model": dataclasses.asdict(config.model),
        "dtype": config.dtype,
        "device": config.device,
        "num_threads": torch.get_num_threads(),
        "attention_backend": config.attention_backend,
    }


def print_context(result: dict[str, Any], weight_bytes: int) -> None:
    """The first lines of every benchmark's output; `weight_bytes` are read by each decode step."""
    machine, model, ceilings = result["machine"], result["model"], result["ceilings"]
    l3 = machine["l3_bytes"]
    print(
        f"machine   {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB, L3 {l3 / 2**20:.0f} MiB, "
        f"{machine['gpu'] or 'no GPU used'}\n"
        f"software  pelton {machine['pelton']} ({machine['commit'] or 'no commit'}), "
        f"torch {machine['torch']}, numpy {machine['numpy']}, Python {machine['python']}, "
        f"{machine['system']}\n"
        f"command   {result['command']}\n"
        f"engine    {model['architecture']}, {model['num_layers']} layers of "
        f"{model['hidden_size']}, {result['dtype']} on {result['device']}, "
        f"{result['num_threads']} threads, {result['attention_backend']} attention\n"
        f"ceilings  read {ceilings['read_bytes_per_s'] / 1e9:.1f} GB/s, products "
        f"{ceilings['flops_per_s'] / 1e12:.3f} TFLOP/s ({result['dtype']}), both measured now"
    )
    if not machine["gpu"] and weight_bytes < l3:
        print(
            f"note      the weights ({weight_bytes / 2**20:.0f} MiB) fit into L3, so a decode step "
            "may beat the memory floor"
        )


def print_ratios(
    what: str,
    engine: Sequence[float],
    baseline: Sequence[float],
    sides: str = "engine / plain loop",
) -> dict[str, Any]:
    """Prints and returns engine / baseline per pair and its median, of speeds."""
    ratios = [a / b for a, b in zip(engine, baseline, strict=True)]
    summary = Summary.of(ratios)
    pairs = " ".join(f"{ratio:.3f}" for ratio in ratios)
    print(
        f"{what} {sides}: median {summary.median:.3f}, from {summary.low:.3f} to "
        f"{summary.high:.3f} (pairs: {pairs})"
    )
    return {"pairs": ratios, **dataclasses.asdict(summary)}


def check_writable(path: str | None, field: str = "json") -> None:
    """Raises ConfigError before minutes are spent on a result that could not be written."""
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{field}={path!r}: the folder does not exist; create it first.")


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Writes the result file, if one was asked for."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
        print(f"written   {path}")
