"""`pelton bench modes`: decode steps with each way of the host's memory to the device, in turns.

    steady       rows of one length: nothing is staged, but that all rows get a block at once
    new blocks   rows of all lengths: with many rows some get a block in each step
    arrivals     and every few steps one row leaves and a new prompt takes its place

A step's time is from one result to the next. A part of it is the launch, in which the host only
queues work: where that takes as long as the step, something keeps the host waiting.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from pelton.bench import machine, measure, report
from pelton.bench.options import ModesOptions
from pelton.bench.shapes import with_shape
from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.core.plan import StepPlan
from pelton.core.request import Request
from pelton.engine.loop import EngineLoop
from pelton.errors import ConfigError, EngineError
from pelton.runner.heads.protocol import StepOutcome
from pelton.setup.check import check
from pelton.setup.resolve import resolve
from pelton.worker.facts import device_facts
from pelton.worker.worker import Worker

CASES = ("steady", "new blocks", "arrivals")
# Tokens that rows may make before all of them decode, and while what is in flight is collected.
_SLACK = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of a step and of its launch, means over a run; the tokens that it made, by request in
    the order of their arrival."""

    step_s: float
    launch_s: float
    tokens: list[list[int]]


def run(args: EngineArgs, options: ModesOptions) -> None:
    """Measures, prints, writes the result file."""
    report.check_writable(options.json)
    if options.baseline or options.profile is not None:
        raise ConfigError(
            "baseline, profile: the sides here are ways of staging; leave them out, and profile a "
            "way with `pelton bench latency --staging-mode`."
        )
    args = with_shape(args, options.model_shape)
    sizes = options.sizes()
    length = options.input_len + args.block_size + options.num_steps + _SLACK
    args = dataclasses.replace(
        args,
        max_num_seqs=args.max_num_seqs or max(sizes),
        max_model_len=args.max_model_len or length,
        # All engines are there at once.
        num_gpu_blocks_override=args.num_gpu_blocks_override
        or (max(sizes) + 1) * (-(-length // args.block_size) + 1) + 1,
    )
    modes = options.mode_list()
    engines = [ModeEngine(dataclasses.replace(args, staging_mode=mode)) for mode in modes]
    config = engines[0].worker.config
    facts = machine.facts(machine.torch_device(config.device))
    result: dict[str, Any] = {
        "command": report.command(),
        "machine": dataclasses.asdict(facts),
        "options": dataclasses.asdict(options),
        **report.engine_context(args, config),
        "staging": [engine.worker.device.describe_staging() for engine in engines],
        "cases": {},
    }
    print(
        f"machine   {facts.cpu}, {facts.gpu or 'no GPU used'}; torch {facts.torch}, "
        f"pelton {facts.pelton} ({facts.commit or 'no commit'})\n"
        f"command   {report.command()}\n"
        f"engine    {config.model.architecture}, {config.model.num_layers} layers of "
        f"{config.model.hidden_size}, {config.dtype} on {config.device}\n"
        f"microseconds of a decode step, and of its launch: means of {options.num_steps}, medians "
        f"of {options.num_iters} runs; more: than {modes[0]}, in pairs"
    )
    print(
        f"{'rows':>5} {'case':12}{'mode':10}"
        + "".join(f"{n:>10}" for n in ("step", "launch"))
        + "      more"
    )
    for rows, case in itertools.product(sizes, CASES):
        samples = measure.alternate(
            engines,
            lambda engine, rows=rows, case=case: engine.sample(rows, case, options),  # type: ignore[misc]
            num_warmup=options.num_iters_warmup,
            num_iters=options.num_iters,
        )
        result["cases"][f"{rows}, {case}"] = tell(rows, case, modes, samples)
    for engine in engines:
        engine.worker.close()
    report.write_json(options.json, result)


def tell(rows: int, case: str, modes: list[str], samples: list[list[Sample]]) -> dict[str, Any]:
    """Prints and returns each mode's seconds and what it takes beyond the first one's. Raises
    EngineError if two modes make other tokens: what they did is then not the same work."""
    found: dict[str, Any] = {}
    for mode, mine in zip(modes, samples, strict=True):
        if [one.tokens for one in mine] != [one.tokens for one in samples[0]]:
            raise EngineError(f"{rows} rows, {case}: {mode} made other tokens than {modes[0]}.")
        steps = [one.step_s for one in mine]
        launch = float(np.median([one.launch_s for one in mine]))
        more = [one.step_s - first.step_s for one, first in zip(mine, samples[0], strict=True)]
        found[mode] = {
            "step_s": dataclasses.asdict(report.Summary.of(steps)),
            "launch_s": launch,
            "more_s": dataclasses.asdict(report.Summary.of(more)),
        }
        difference = "" if mode == modes[0] else f"{1e6 * float(np.median(more)):+10.1f}"
        print(
            f"{rows:>5} {case:12}{mode:10}{1e6 * float(np.median(steps)):10.1f}"
            f"{1e6 * launch:10.1f}{difference}",
            flush=True,
        )
    return found


class ModeEngine:
    """Scheduler, worker and loop without text, its launches timed."""

    def __init__(self, args: EngineArgs) -> None:
        checked = check(args)
        config = resolve(checked, device_facts(checked.args.device))
        self.worker = Worker(config, checked.checkpoint)
        self.loop = EngineLoop(self.worker.config, self.worker)
        while self.loop.idle():  # all shapes are recorded now
            pass
        self._ids = itertools.count()
        self._tokens: dict[str, list[int]] = {}
        self._plan: StepPlan | None = None
        self._launch_s = 0.0
        execute = self.worker.execute

        def timed(plan: StepPlan) -> StepOutcome:
            started = time.perf_counter()
            outcome = execute(plan)
            self._launch_s += time.perf_counter() - started
            self._plan = plan
            return outcome

        vars(self.worker)["execute"] = timed

    def sample(self, rows: int, case: str, options: ModesOptions) -> Sample:
        """One run: `rows` prompts, and num_steps steps once all of them decode."""
        self._tokens.clear()
        generator = np.random.default_rng(0)
        block_size = self.worker.config.cache.block_size

        def add(index: int) -> str:
            length = options.input_len + (0 if case == "steady" else index % block_size)
            return self._add(generator, length, options.num_steps + _SLACK)

        running = deque(add(index) for index in range(rows))
        while self._plan is None or not _decodes(self._plan, rows):
            self._step()
        self._launch_s = 0.0
        started = time.perf_counter()
        for index in range(options.num_steps):
            if case == "arrivals" and index % options.arrival_every == 0:
                self.loop.abort(running.popleft())
                running.append(add(index))
            self._step()
        seconds = time.perf_counter() - started
        launch_s = self._launch_s
        for name in running:
            self.loop.abort(name)
        while self.loop.has_work():
            self._step()
        self._plan = None
        return Sample(
            seconds / options.num_steps,
            launch_s / options.num_steps,
            list(self._tokens.values()),
        )

    def _add(self, generator: np.random.Generator, length: int, max_tokens: int) -> str:
        name = f"modes-{next(self._ids)}"
        vocab_size = self.worker.config.model.vocab_size
        prompt = generator.integers(0, vocab_size, length, dtype=np.int32)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.loop.add(Request(name, prompt, params, seed=0))
        self._tokens[name] = []
        return name

    def _step(self) -> None:
        for update, _ in self.loop.step():
            if update.error is not None:
                raise EngineError(f"A benchmark's request failed: {update.error}")
            self._tokens[update.request.request_id] += update.new_token_ids


def _decodes(plan: StepPlan, rows: int) -> bool:
    """Whether all rows are there and none has a prompt in the step."""
    counts = plan.num_scheduled_tokens
    return len(counts) == rows and not plan.new_rows and bool((counts == 1).all())
