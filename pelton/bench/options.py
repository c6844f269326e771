"""What each benchmark can be asked; the command line makes its flags from these fields."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pelton.errors import ConfigError

# Fewer alternating pairs say nothing about a ratio.
MIN_PAIRS = 5


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What every benchmark has. Raises ConfigError for values that measure nothing.

    num_iters: measured iterations.
    num_iters_warmup: iterations before them, not counted.
    baseline: alternate with a plain eager PyTorch loop over the same weights (>= 5 iterations).
    json: file for everything measured.
    """

    num_iters: int = 5
    num_iters_warmup: int = 1
    baseline: bool = False
    json: str | None = None

    def __post_init__(self) -> None:
        least = {"num_iters": MIN_PAIRS if self.baseline else 1, "num_iters_warmup": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = least.get(field.name, 1)
            if type(value) is int and value < low:
                raise ConfigError(f"{field.name} must be at least {low}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(BenchOptions):
    """One batch, all rows in step.

    input_len: prompt length of each row, in tokens.
    output_len: tokens made per row; 1 measures prefill alone.
    batch_size: rows.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(BenchOptions):
    """One answer with speculative_config and without, in turns.

    prompt_file: a user's message; left out: a text that is to be repeated.
    output_len: tokens made.
    """

    prompt_file: str | None = None
    output_len: int = 64


@dataclass(frozen=True, kw_only=True)
class OffloadingOptions(BenchOptions):
    """Long prompts in a small pool, with kv_offloading_size and without, in turns.

    num_prompts: requests.
    input_len: prompt length of each, in tokens.
    output_len: tokens made for each.
    """

    num_prompts: int = 6
    input_len: int = 1024
    output_len: int = 16


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """Many requests at once; the scheduler decides how many run together (the baseline runs all
    as one batch).

    num_prompts: requests.
    input_len: prompt length of each, in tokens.
    output_len: tokens made for each.
    """

    num_prompts: int = 64
    input_len: int = 128
    output_len: int = 64
