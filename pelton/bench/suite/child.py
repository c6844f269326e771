"""One subject's process: an engine from nothing, then its cases in turns.

    python -m pelton.bench.suite.child FD < request

What happens is written as it happens, one JSON object a line, to the pipe FD: {"first_token": true}
when the first token of a short request exists, {"context": ...}, {"case": name, "side": name,
"timing": [...]} or "error": sentence for each run, {"case": name, "profile": {...}}. So nothing
measured is lost when a later case fails, or the time is up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pelton.bench import machine, measure, profile, report
from pelton.bench.overhead import serve
from pelton.bench.shapes import with_shape
from pelton.bench.suite.cases import ENGINE, Case, Timing
from pelton.bench.suite.live import open_live
from pelton.bench.suite.served import Served
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.core.plan import Int32Array
from pelton.engine.llm import LLM

_SPECIAL_IDS = 1000
"""Ids below are often special; none is drawn from as many at the end either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """args: of the engine. shape: a name from bench/shapes.py. deadline: of time.monotonic, which
    all processes of a machine share. profile: the beginning of the paths of traces; None = none.
    is_live: take turns with the peers that can run here. is_served: behind a server."""

    args: dict[str, Any]
    shape: str | None
    cases: list[Case]
    iterations: int
    deadline: float
    profile: str | None = None
    is_live: bool = False
    is_served: bool = False

    @classmethod
    def of(cls, text: str) -> Request:
        values = json.loads(text)
        values["cases"] = [Case(**case) for case in values["cases"]]
        return cls(**values)

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))


class Prompts:
    """Random ids, new ones for each run, so that nothing can be used again."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        margin = min(_SPECIAL_IDS, vocab_size // 4)
        self._low, self._high = margin, vocab_size - margin
        self._generator = np.random.default_rng(abs(seed))

    def draw(self, batch_size: int, input_len: int) -> Int32Array:
        """[batch_size, input_len]"""
        shape = (batch_size, input_len)
        return self._generator.integers(self._low, self._high, shape, dtype=np.int32)


AnySide = measure.Side | Served


def run_case(side: AnySide, prompts: Prompts, case: Case) -> Timing:
    """What one run took. Raises EngineError if an answer is not whole."""
    if isinstance(side, Served):
        return side.run(case, prompts.draw)
    shape = (case.batch_size, case.input_len)
    first = measure.timed_generate(side, prompts.draw(*shape), 1) if case.has_first else 0.0
    return first, measure.timed_generate(side, prompts.draw(*shape), case.output_len)


def warm_up(side: AnySide, prompts: Prompts, case: Case) -> None:
    """What the case's first run would otherwise be the first to do."""
    if isinstance(side, Served):
        side.warm_up(case, prompts.draw)
    elif case.has_first or case.output_len > 1:
        side.generate(prompts.draw(case.batch_size, min(case.input_len, 128)), 8)
    else:
        side.generate(prompts.draw(1, case.input_len), 1)


class Rounds:
    """Each case once, then each once more, as long as there is time: with little of it all cases
    have a figure, and with much all have many. A run that would probably not end in time is not
    begun; the first one of a case is begun while there is any."""

    def __init__(self, cases: Sequence[Case], iterations: int, deadline: float) -> None:
        self._cases = list(cases)
        self._iterations = iterations
        self._deadline = deadline
        self._seconds: dict[tuple[str, str], float] = {}
        self._failed: set[tuple[str, str]] = set()

    def run(self, sides: Mapping[str, AnySide], prompts: Prompts, write: _Writer) -> None:
        """sides: by name, the engine first; in each round they take turns, in swapped order. One
        that fails is not asked for that case again."""
        for round_ in range(self._iterations):
            for case in self._cases:
                names = [name for name in sides if (case.name, name) not in self._failed]
                if self._begins_late(case, names):
                    continue
                for name in names if round_ % 2 == 0 else reversed(names):
                    self._once(case, name, sides[name], prompts, write)

    def _begins_late(self, case: Case, names: Sequence[str]) -> bool:
        needed = sum(self._seconds.get((case.name, name), 0.0) for name in names)
        return time.monotonic() + needed > self._deadline

    def _once(self, case: Case, name: str, side: AnySide, prompts: Prompts, write: _Writer) -> None:
        key = (case.name, name)
        try:
            if key not in self._seconds:
                warm_up(side, prompts, case)
            begin = time.monotonic()
            timing = run_case(side, prompts, case)
        except Exception as error:
            self._failed.add(key)
            write({"case": case.name, "side": name, "error": f"{type(error).__name__}: {error}"})
            return
        self._seconds[key] = time.monotonic() - begin
        write({"case": case.name, "side": name, "timing": timing})


class _Writer:
    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "w", buffering=1, encoding="utf-8")

    def __call__(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")


def main(fd: int, text: str) -> None:
    write = _Writer(fd)
    request = Request.of(text)
    args = with_shape(EngineArgs(**request.args), request.shape, has_tokenizer=request.is_served)
    if request.is_served:
        _serve(request, args, write)
        return
    llm = LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    write({"ready": True})
    side = measure.EngineSide(llm)
    config: EngineConfig = llm.config
    prompts = Prompts(config.model.vocab_size, config.seed)
    side.generate(prompts.draw(1, 128), 1)
    write({"first_token": True})
    if request.cases:
        llm.settle()
    device = machine.torch_device(config.device)
    context = report.engine_context(args, config)
    context["machine"] = dataclasses.asdict(machine.facts(device))
    context["start_seconds"] = llm.start_times
    write({"context": context})
    sides = {ENGINE: side, **(open_live() if request.is_live and request.cases else {})}
    Rounds(request.cases, request.iterations, request.deadline).run(sides, prompts, write)
    if request.cases:
        ceilings = machine.measure_ceilings(device, getattr(torch, config.dtype))
        peaks = machine.cpu_peaks() if device.type == "cpu" else {}
        write({"ceilings": dataclasses.asdict(ceilings), "peaks": peaks})
        if request.profile is not None:
            _profile(request, side, prompts, config, ceilings, write)
    # Without an orderly end of everything: what was measured is written, and the next one waits.
    sys.stderr.flush()
    os._exit(0)


def _serve(request: Request, args: EngineArgs, write: _Writer) -> None:
    """The cases of a server, in a process of its own. It has no traces."""
    assert args.model is not None, "a model of its own, for its tokenizer"
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    device = machine.torch_device(args.device)
    facts = dataclasses.asdict(machine.facts(device))
    write({"context": {"engine_args": request.args, "machine": facts}})
    with serve(args) as (url, _):
        write({"ready": True})
        prompts = Prompts(vocab_size, args.seed)
        rounds = Rounds(request.cases, request.iterations, request.deadline)
        rounds.run({ENGINE: Served(url)}, prompts, write)


def _profile(
    request: Request,
    side: measure.Side,
    prompts: Prompts,
    config: EngineConfig,
    ceilings: machine.Ceilings,
    write: _Writer,
) -> None:
    for case in request.cases:
        if time.monotonic() > request.deadline:
            return
        print(f"profile   {case.name}")
        path = f"{request.profile}-{case.name}.json"
        drawn = prompts.draw(case.batch_size, case.input_len)
        try:
            told = profile.of_run(path, side, drawn, case.output_len, config, ceilings)
        except Exception as error:
            told = {"profile": {"error": f"{type(error).__name__}: {error}"}}
        write({"case": case.name, **told})
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.stdin.read())
