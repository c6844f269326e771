"""What the suite measures: of each subject (a model on a device) a list of cases."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pelton.config.names import known_names
from pelton.errors import ConfigError

Kind = Literal["decode", "total", "output", "prefill", "serving"]
Timing = tuple[float, ...]
"""Seconds of a run that makes one token (0 where the case has none), and of the whole run. Of
serving: seconds of a gap between tokens that 99 % keep to, seconds to the first token in the
median, and tokens per second."""


@dataclass(frozen=True, slots=True)
class Case:
    """batch_size prompts of input_len random tokens, output_len tokens made of each.

    kind: what is told of it. decode: milliseconds per decode step, and for one row those until the
    first token too; total, output, prefill: tokens per second of the whole run, counting prompts
    and answers, answers, prompts; serving: gaps, first tokens and answers' tokens per second over
    HTTP, where batch_size requests come each second for so many seconds, one of each second's with
    a prompt of long_len.
    """

    name: str
    kind: Kind
    batch_size: int
    input_len: int
    output_len: int
    long_len: int = 0
    seconds: int = 0

    @property
    def has_first(self) -> bool:
        return self.kind == "decode"

    def rows(self) -> list[tuple[str, str]]:
        """(name, unit) of each figure."""
        if self.kind == "serving":
            units = ("ms", "ms", "tokens/s")
            return list(zip(self._serving_names(), units, strict=True))
        if self.kind != "decode":
            return [(self.name, "tokens/s")]
        first = [("first_token", "ms")] if self.batch_size == 1 and self.name == "decode1" else []
        return [(self.name, "ms"), *first]

    def values(self, timings: Sequence[Timing]) -> dict[str, tuple[float, list[float]]]:
        """Per figure: its value, of the medians of the runs, and one of each run."""
        if self.kind == "serving":
            return self._of_server(timings)
        firsts, wholes = [t[0] for t in timings], [t[1] for t in timings]
        medians = (statistics.median(firsts), statistics.median(wholes))
        found = {self.name: (self._value(medians), [self._value(one) for one in timings])}
        if len(self.rows()) == 2:
            found["first_token"] = (medians[0] * 1e3, [value * 1e3 for value in firsts])
        return found

    def _serving_names(self) -> tuple[str, str, str]:
        return f"{self.name}_gap99", f"{self.name}_first", f"{self.name}_rate"

    def _of_server(self, timings: Sequence[Timing]) -> dict[str, tuple[float, list[float]]]:
        gaps, firsts, rates = zip(*timings, strict=True)
        columns = ([t * 1e3 for t in gaps], [t * 1e3 for t in firsts], list(rates))
        medians = ((statistics.median(column), column) for column in columns)
        return dict(zip(self._serving_names(), medians, strict=True))

    def _value(self, timing: Timing) -> float:
        if self.kind == "decode":
            return (timing[1] - timing[0]) / (self.output_len - 1) * 1e3
        counted = {
            "total": self.input_len + self.output_len,
            "output": self.output_len,
            "prefill": self.input_len,
        }
        return self.batch_size * counted[self.kind] / timing[1]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on a device.

    shape: a name from bench/shapes.py, or None for the embedded model. engine: arguments of the
    engine beside the user's. iterations: of each case. start: "first token" | "ready": until when
    a start from nothing is timed; both with kernels to be compiled and with them at hand, or, for
    "ready", with them at hand alone; "no": not. is_live: peers that are installed run here, too, in
    turns. is_served: the engine is behind a server.
    """

    name: str
    device: str
    shape: str | None
    engine: dict[str, Any]
    iterations: int
    cases: tuple[Case, ...]
    start: Literal["first token", "ready", "no"] = "first token"
    is_live: bool = False
    is_served: bool = False

    def start_rows(self) -> list[tuple[str, str]]:
        names = {"first token": ("start_cold", "start_warm"), "ready": ("start_warm",), "no": ()}
        return [(name, "s") for name in names[self.start]]


START = "start"
ENGINE = "engine"

_GPU = (
    Case("decode1", "decode", 1, 128, 256),
    Case("decode8", "decode", 8, 128, 256),
    Case("decode32", "decode", 32, 128, 256),
    Case("decode64", "decode", 64, 128, 256),
    Case("decode128", "decode", 128, 128, 256),
    Case("decode256", "decode", 256, 128, 256),
    Case("prefill", "prefill", 64, 4096, 1),
    Case("offline", "total", 256, 1024, 256),
)
_LONG = (Case("decode1_4k", "decode", 1, 4096, 256),)
_FAR = (
    Case("decode1_32k", "decode", 1, 32768, 64),
    Case("decode8_32k", "decode", 8, 32768, 64),
)
_FEW = tuple(case for case in _GPU if case.name in ("decode1", "decode64", "prefill"))
_SERVED = (
    Case("serve8", "serving", 8, 128, 128, long_len=4096, seconds=10),
    Case("serve64", "serving", 64, 128, 128, long_len=4096, seconds=10),
)
_CPU = (
    Case("batch1", "output", 1, 32, 128),
    Case("prefill", "prefill", 1, 2048, 1),
    Case("batch32", "output", 32, 256, 128),
    Case("batch64", "output", 64, 128, 64),
)
_PACKED = tuple(case for case in _CPU if case.name != "batch64")
_GPU_ENGINE = {"max_model_len": 8192}

SUBJECTS = (
    Subject("qwen3-0.6b", "cuda", "qwen3-0.6b", _GPU_ENGINE, 9, _GPU),
    Subject("qwen3-8b", "cuda", "qwen3-8b", _GPU_ENGINE, 5, _GPU + _LONG),
    Subject("qwen3-30b-a3b", "cuda", "qwen3-30b-a3b", _GPU_ENGINE, 3, _FEW),
    Subject(
        "8b-32k",
        "cuda",
        "qwen3-8b",
        {"max_model_len": 33280, "max_num_seqs": 16},
        3,
        _FAR,
        "no",
    ),
    Subject(
        "8b-invariant",
        "cuda",
        "qwen3-8b",
        _GPU_ENGINE | {"batch_invariant": True},
        3,
        _FEW,
        "no",
    ),
    Subject("8b-served", "cuda", "qwen3-8b", _GPU_ENGINE, 3, _SERVED, "no", is_served=True),
    Subject(
        "smollm2-bf16",
        "cpu",
        None,
        {"dtype": "bfloat16", "quantization": "dequantise"},
        5,
        _CPU,
        "ready",
        is_live=True,
    ),
    Subject("smollm2-q4_1", "cpu", None, {"quantization": "gguf"}, 5, _PACKED, "ready"),
)


def chosen(device: str, only: str | None) -> list[tuple[Subject, bool]]:
    """The subjects of a kind of device, each with the cases that `only` names, and whether its
    start is to be measured.

    only: names of subjects, cases, or subject/case, with commas; None = all.
    Raises ConfigError for a device without subjects, and for a name that fits nothing.
    """
    subjects = [subject for subject in SUBJECTS if subject.device == device]
    if not subjects:
        devices = sorted({subject.device for subject in SUBJECTS})
        raise ConfigError(f"device={device!r} has no suite; there is one of {', '.join(devices)}.")
    words = [word.strip() for word in only.split(",")] if only is not None else []
    known = {name for subject in subjects for name in _names(subject)}
    for word in words:
        if word not in known:
            raise ConfigError(f"only={word!r} is no case of the suite." + known_names(word, known))
    found = []
    for subject in subjects:

        def is_meant(case: str, of: str = subject.name) -> bool:
            return not words or any(word in (of, case, f"{of}/{case}") for word in words)

        cases = tuple(case for case in subject.cases if is_meant(case.name))
        has_start = subject.start != "no" and is_meant(START)
        if cases or has_start:
            found.append((dataclasses.replace(subject, cases=cases), has_start))
    return found


def _names(subject: Subject) -> list[str]:
    start = () if subject.start == "no" else (START,)
    cases = [*start, *(case.name for case in subject.cases)]
    return [subject.name, *cases, *(f"{subject.name}/{case}" for case in cases)]
