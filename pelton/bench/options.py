"""What each benchmark can be asked; the command line makes its flags from these fields."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from pelton.config.server_url import read_server_url
from pelton.config.sizes import Tokens, read_sizes
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError

# Fewer alternating pairs say nothing about a ratio.
MIN_PAIRS = 5


def _numbers(text: str, field: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{field} must be positive numbers with commas, got {text!r}.")
    return [int(word) for word in words]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What every benchmark has. Raises ConfigError for values that measure nothing.

    num_iters: measured iterations.
    num_iters_warmup: iterations before them, not counted.
    baseline: alternate with a plain eager PyTorch loop over the same weights (>= 5 iterations).
    model_shape: random weights of a well-known shape, instead of a model: a name from
        bench/shapes.py, such as qwen3-8b.
    json: file for everything measured.
    profile: file for a Chrome trace of one more run of the engine; a table of what a step of it is
        made of is printed.
    """

    num_iters: int = 5
    num_iters_warmup: int = 1
    baseline: bool = False
    model_shape: str | None = None
    json: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        read_sizes(self)
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

    input_len: Tokens = 32
    output_len: Tokens = 128
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True)
class SuiteOptions:
    """All figures that a device is measured by, beside those of others. Raises ConfigError for
    values that measure nothing.

    only: models, cases or model/case, with commas, instead of all.
    budget: seconds for everything; models share it, and all cases are run once before any is run
        again.
    num_iters: runs of each case, as far as there is time; the suite's own number if left out.
    json: file for everything measured, written anew after each run.
    profile: folder for a Chrome trace of each case but a server's, once all are measured; a table
        of what a step is made of is printed.
    """

    only: str | None = None
    budget: float = 1800.0
    num_iters: int | None = None
    json: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ConfigError(f"budget must be above 0, got {self.budget}.")
        if self.num_iters is not None and self.num_iters < 1:
            raise ConfigError(f"num_iters must be at least 1, got {self.num_iters}.")


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(BenchOptions):
    """One answer with speculative_config and without, in turns.

    prompt_file: a user's message; left out: a text that is to be repeated.
    output_len: tokens made.
    """

    prompt_file: str | None = None
    output_len: Tokens = 64


@dataclass(frozen=True, kw_only=True)
class OffloadingOptions(BenchOptions):
    """Long prompts in a small pool, with kv_offloading_size and without, in turns.

    num_prompts: requests.
    input_len: prompt length of each, in tokens.
    output_len: tokens made for each.
    """

    num_prompts: int = 6
    input_len: Tokens = 1024
    output_len: Tokens = 16


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(BenchOptions):
    """Many requests at once; the scheduler decides how many run together (the baseline runs all
    as one batch).

    num_prompts: requests.
    input_len: prompt length of each, in tokens.
    output_len: tokens made for each.
    """

    num_prompts: int = 64
    input_len: Tokens = 128
    output_len: Tokens = 64


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """Texts become vectors. Raises ConfigError for values that measure nothing.

    num_prompts: texts.
    input_len: of the longest one, in words; most are shorter.
    num_iters: measured iterations.
    num_iters_warmup: iterations before them, not counted.
    baseline: alternate with sentence-transformers on the same files (>= 5 iterations).
    json: file for everything measured.
    """

    num_prompts: int = 512
    input_len: Tokens = 200
    num_iters: int = 5
    num_iters_warmup: int = 1
    baseline: bool = False
    json: str | None = None

    def __post_init__(self) -> None:
        read_sizes(self)
        least = {"num_iters": MIN_PAIRS if self.baseline else 1, "num_iters_warmup": 0}
        for name in ("num_prompts", "input_len", "num_iters", "num_iters_warmup"):
            value, low = getattr(self, name), least.get(name, 1)
            if value < low:
                raise ConfigError(f"{name} must be at least {low}, got {value}.")


@dataclass(frozen=True, kw_only=True)
class HostOptions(BenchOptions):
    """The host's work for a decode step, on a device that computes nothing.

    rows: numbers of rows to measure, with commas.
    input_len: prompt length of each, in tokens; some are up to a block longer.
    output_len: tokens made for each.
    """

    rows: str = "1,32,256"
    input_len: Tokens = 32
    output_len: Tokens = 66

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_len < 4:
            raise ConfigError(f"output_len must be at least 4, got {self.output_len}.")
        self.sizes()

    def sizes(self) -> list[int]:
        return _numbers(self.rows, "rows")


@dataclass(frozen=True, kw_only=True)
class StagingOptions:
    """Rows of tokens from the host into a table of the device.

    device: "auto" | "cpu" | "cuda" | "cuda:N".
    staging_mode: how: "auto" | "aliased" | "pinned" | "pageable".
    num_iters: measured iterations.
    num_iters_warmup: iterations before them, not counted.
    json: file for everything measured.
    """

    device: str = "cpu"
    staging_mode: str = "auto"
    num_iters: int = 30
    num_iters_warmup: int = 4
    json: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_iters", 1), ("num_iters_warmup", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.staging_mode not in ("auto", *STAGING_MODES):
            raise ConfigError(
                f"staging_mode must be auto, aliased, pinned or pageable, got "
                f"{self.staging_mode!r}."
            )


@dataclass(frozen=True, kw_only=True)
class ModesOptions(BenchOptions):
    """Decode steps with each staging_mode, in turns.

    modes: which ones, with commas; the others are compared with the first.
    rows: numbers of rows to measure, with commas.
    input_len: prompt length of each, in tokens; some are up to a block longer.
    num_steps: steps of a run.
    arrival_every: steps after which one row leaves and another one comes.
    """

    modes: str = ",".join(STAGING_MODES)
    rows: str = "1,64,256"
    input_len: Tokens = 32
    num_steps: int = 64
    arrival_every: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes()
        self.mode_list()

    def sizes(self) -> list[int]:
        return _numbers(self.rows, "rows")

    def mode_list(self) -> list[str]:
        words = [word.strip() for word in self.modes.split(",")]
        if not set(words) <= set(STAGING_MODES) or len(set(words)) < len(words):
            raise ConfigError(
                f"modes must be of {', '.join(STAGING_MODES)}, each once, with commas, got "
                f"{self.modes!r}."
            )
        return words


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Requests to a server that speaks OpenAI's API. Raises ConfigError for what measures nothing.

    url: where it is.
    endpoint: "completions" | "chat", which needs a dataset.
    model_name: what to ask for; the server's first model if left out.
    api_key: the server's.
    num_prompts: requests that are measured.
    num_warmups: requests before them, which are not.
    request_rate: requests sent per second, at random times; inf: all at once.
    burstiness: of the times: 1 = as of independent clients (Poisson), less = in bursts, more =
        evenly (shape of the gamma distribution of gaps).
    max_concurrency: requests on their way at a time; further ones wait here.
    input_len: tokens of each prompt: random ids, for completions.
    output_len: tokens asked for, per request.
    dataset: file to take prompts from instead: JSON lines with `prompt` or `messages`, and perhaps
        `output_len`; or ShareGPT's JSON.
    vocab_size: random ids are drawn from 100 up to it.
    ignore_eos: go on after end tokens, so that each answer has output_len tokens.
    temperature: of the requests; 0 = greedy.
    extra_body: further fields of each request.
    goodput: what a good request keeps, in milliseconds, as `ttft:200,tpot:50,e2e:3000`.
    percentiles: which ones to tell.
    continuous_usage: ask for token counts in each chunk; without it the tokens of an answer are
        taken to be spread evenly over its chunks.
    tokenizer: folder with tokenizer.json, to count the tokens of a server that does not.
    timeout: seconds after which a request has failed.
    seed: of lengths, ids and times.
    save_result: JSON file for everything measured.
    plot: SVG file with latencies over time.
    """

    url: str = "http://127.0.0.1:8000"
    endpoint: str = "completions"
    model_name: str | None = None
    api_key: str | None = None
    num_prompts: int = 100
    num_warmups: int = 1
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    input_len: Tokens = 128
    output_len: Tokens = 64
    dataset: str | None = None
    vocab_size: int = 1000
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] | None = None
    goodput: str | None = None
    percentiles: str = "50,90,99"
    continuous_usage: bool = True
    tokenizer: str | None = None
    timeout: float = 600.0
    seed: int = 0
    save_result: str | None = None
    plot: str | None = None

    def __post_init__(self) -> None:
        read_sizes(self)
        read_server_url(self.url)
        least = {"num_warmups": 0, "vocab_size": 101, "seed": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = least.get(field.name, 1)
            if type(value) is int and field.name != "temperature" and value < low:
                raise ConfigError(f"{field.name} must be at least {low}, got {value}.")
        for name in ("request_rate", "burstiness", "timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}.")
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f'endpoint must be "completions" or "chat", got {self.endpoint!r}.')
        if self.endpoint == "chat" and self.dataset is None:
            raise ConfigError("endpoint=chat needs texts: name a dataset.")
        if self.plot is not None and not self.plot.endswith(".svg"):
            raise ConfigError(f"plot must end with .svg, the one kind there is; got {self.plot!r}.")
        self.percentile_list()
        self.limits()

    def percentile_list(self) -> list[float]:
        try:
            found = [float(word) for word in self.percentiles.split(",")]
        except ValueError:
            found = [-1.0]
        if not all(0 <= value <= 100 for value in found):
            raise ConfigError(
                f"percentiles must be numbers from 0 to 100 with commas, got {self.percentiles!r}."
            )
        return found

    def limits(self) -> dict[str, float]:
        """Of goodput: metric -> seconds."""
        found: dict[str, float] = {}
        for word in (self.goodput or "").split(",") if self.goodput else ():
            name, _, text = word.strip().partition(":")
            name = "e2e" if name == "e2el" else name
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if name not in ("ttft", "tpot", "e2e") or not value > 0:
                raise ConfigError(
                    f"goodput must be as in `ttft:200,tpot:50,e2e:3000`, in ms, got {word!r}."
                )
            found[name] = value / 1000
        return found


@dataclass(frozen=True, kw_only=True)
class OverheadOptions(BenchOptions):
    """The server with so many streams at a time, and the offline engine, in turns.

    num_prompts: requests; all run at once.
    input_len: prompt length of each, in tokens.
    output_len: tokens made for each.
    """

    num_prompts: int = 32
    input_len: Tokens = 32
    output_len: Tokens = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline:
            raise ConfigError("baseline: here the other side is the engine alone; leave it out.")
