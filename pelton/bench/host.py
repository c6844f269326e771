"""`pelton bench host`: what a decode step costs the host, part by part, on any machine.

The engine is whole but for its device, which computes nothing and answers each step with one token
a row. So what is left is the host's work: a GPU's step hides as much of it as the step takes, and a
small model's step may take less. Processor time of the one thread is what counts, so that a busy
machine measures the same.

    schedule     rows, tokens and blocks of the step
    start        the step described, staged and launched
    replay       of a recorded step: all its kernels called, none of which does anything
    finish       the result's way to the host, and the staging slot's fence
    output       the result read, tokens booked, requests ended
    detokenize   text of the new tokens: what steps with it take more than those without
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pelton.bench import machine, report
from pelton.bench.options import HostOptions
from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.core.request import Request
from pelton.device.cpu import CPUDevice
from pelton.device.native.library import library
from pelton.device.native.tape import NativeTape
from pelton.engine.loop import EngineLoop
from pelton.engine.open_requests import OpenRequests
from pelton.engine.prompts import load_tokenizer_of
from pelton.errors import ConfigError
from pelton.setup.check import check
from pelton.setup.resolve import resolve
from pelton.worker.facts import device_facts
from pelton.worker.worker import Worker

PARTS = ("schedule", "start", "replay", "finish", "output", "detokenize")
_FIRST_TOKEN = 100


class IdleDevice(CPUDevice):
    """Runs no kernel. A step's packed results, [B, 1 + K + 2], say one token for each row, of all
    that a vocabulary of `vocab_size` has, each row and step another one."""

    _is_idle = False

    def __init__(self, vocab_size: int) -> None:
        super().__init__(1)
        self._is_idle = True  # the probe of its memory has run
        self._tokens = np.random.default_rng(0).integers(0, vocab_size, 1 << 16, np.int32)
        self._next = 0

    def launch(self, kernel: Callable[..., object], *args: Any) -> None:
        if not self._is_idle or self._recorder.launches is not None:
            super().launch(kernel, *args)

    def record(self, run: Callable[[], object]) -> NativeTape:
        return NativeTape(self._recorder.record(run), library(), is_hollow=True)

    def copy_to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self._is_idle:
            super().copy_to_host(target, source)
        elif target.dim() == 2 and target.dtype == torch.int32:
            packed = target.numpy()
            packed[:] = 0
            self._next = (self._next + 1009) % (len(self._tokens) - len(packed))
            packed[:, 0] = self._tokens[self._next : self._next + len(packed)]
            packed[:, -2] = 1


class _Clock:
    """Seconds of the step under way, by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - started

        return timed


class _Engine:
    """The offline engine over the idle device."""

    def __init__(self, args: EngineArgs) -> None:
        checked = check(args)
        self.config = resolve(checked, device_facts("cpu"))
        self.tokenizer = load_tokenizer_of(checked)
        self.clock = clock = _Clock()
        device = IdleDevice(self.config.model.vocab_size)
        record = device.record

        def timed(run: Callable[[], object]) -> NativeTape:
            tape = record(run)
            vars(tape)["replay"] = clock.around("replay", tape.replay)
            return tape

        vars(device)["record"] = timed
        worker = Worker(self.config, checked.checkpoint, device=device)
        self.loop = EngineLoop(self.config, worker)
        self.opened = OpenRequests(self.loop.add, self.loop.abort, self.tokenizer)
        scheduler = self.loop.scheduler
        vars(scheduler)["schedule"] = clock.around("schedule", scheduler.schedule)
        vars(worker)["execute"] = clock.around("execute", worker.execute)
        vars(worker.runner)["finish"] = clock.around("finish", worker.runner.finish)
        self._ids = itertools.count()

    def add(self, prompt_len: int, output_len: int, *, detokenize: bool) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=detokenize
        )
        name = f"host-{next(self._ids)}"
        prompt = np.full(prompt_len, _FIRST_TOKEN, np.int32)
        self.opened.open(Request(name, prompt, params, eos_token_ids=(), seed=0), None)

    def step(self) -> int:
        """Returns how many rows got a token."""
        updates = self.loop.step()
        self.opened.take(updates)
        return len(updates)

    def decode_steps(
        self, num_rows: int, input_len: int, output_len: int, *, detokenize: bool = True
    ) -> list[dict[str, float]]:
        """Microseconds by part of each step in which all rows decode.

        Prompts differ in length, so that new blocks do not come to all rows at once.
        """
        for row in range(num_rows):
            length = input_len + row % self.config.cache.block_size
            self.add(length, output_len, detokenize=detokenize)
        found = []
        while self.opened:
            self.clock.seconds.clear()
            started = time.thread_time()
            count = self.step()
            total = time.thread_time() - started
            if count == num_rows:
                found.append(self._by_part(total))
        # The first one computed the prompts, the last one ended all requests.
        return found[1:-1]

    def _by_part(self, total: float) -> dict[str, float]:
        seconds = self.clock.seconds
        parts = {name: seconds[name] for name in ("schedule", "replay", "finish")}
        parts["start"] = seconds["execute"] - seconds["finish"] - seconds["replay"]
        parts["output"] = total - sum(parts.values())
        return {name: value * 1e6 for name, value in parts.items()} | {"step": total * 1e6}


def run(args: EngineArgs, options: HostOptions) -> None:
    """Measures, prints, writes the result file."""
    report.check_writable(options.json)
    if options.baseline or options.model_shape is not None:
        raise ConfigError(
            "baseline, model_shape: the device of this benchmark computes nothing; leave them out."
        )
    sizes = options.sizes()
    length = options.input_len + options.output_len
    args = dataclasses.replace(
        args,
        device="cpu",
        max_num_seqs=max(sizes),
        # All prompts in one step: then all rows decode together.
        max_num_batched_tokens=max(sizes) * (options.input_len + args.block_size),
        max_model_len=args.max_model_len or length + 4 * args.block_size,
        # Memory that nobody touches costs nothing.
        num_gpu_blocks_override=max(sizes) * (-(-length // args.block_size) + 2) + 1,
    )
    engine = _Engine(args)
    device = machine.torch_device("cpu")
    result: dict[str, Any] = {
        "command": report.command(),
        "machine": dataclasses.asdict(machine.facts(device)),
        "options": dataclasses.asdict(options),
        "rows": {},
    }
    cpu = result["machine"]["cpu"]
    print(f"machine   {cpu}\ncommand   {result['command']}\nmicroseconds of a decode step, median")
    print(f"{'rows':>6}" + "".join(f"{name:>12}" for name in (*PARTS, "step", "p99")))
    for num_rows in sizes:
        silent: list[dict[str, float]] = []
        spoken: list[float] = []
        for iteration in range(options.num_iters_warmup + options.num_iters):
            shape = num_rows, options.input_len, options.output_len
            without = engine.decode_steps(*shape, detokenize=False)
            whole = engine.decode_steps(*shape)
            if iteration >= options.num_iters_warmup:
                silent += without
                spoken += [step["step"] for step in whole]
        parts = {name: float(np.median([step[name] for step in silent])) for name in PARTS[:-1]}
        total = report.Summary.of(spoken)
        # A clock around each row's text would cost a tenth of it.
        parts["detokenize"] = total.median - float(np.median([one["step"] for one in silent]))
        result["rows"][num_rows] = parts | {"step": dataclasses.asdict(total)}
        line = [*(parts[name] for name in PARTS), total.median, total.p99]
        print(f"{num_rows:>6}" + "".join(f"{value:12.1f}" for value in line))
    report.write_json(options.json, result)
