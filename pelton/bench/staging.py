"""`pelton bench staging`: what it costs to bring rows of tokens from the host into a table.

Four arms, in turns: rows as Python lists or as arrays, their contents copied to the device from a
new buffer or written to a block of a ring. Lists that are copied are what others did, and are here
alone; arrays in a ring are what the engine does, whose own code, `Staging`, is the last line.

    convert   the rows become one array of words
    write     that array goes to memory that the device reads, or copies
    launch    copies and the kernel are queued
    device    until they have run

A ring's block is warm in steady reuse, absent at first, and too small at a boundary. Copies make
their buffer anew each time, and are the same in all three. Other ways between host and device
follow: see staging_paths.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from pelton.batch.staged import Staging
from pelton.bench import machine, report
from pelton.bench.clock import PHASES, Clock
from pelton.bench.measure import alternate
from pelton.bench.options import StagingOptions
from pelton.bench.staging_paths import paths
from pelton.core.plan import Int32Array
from pelton.device.named import named_device
from pelton.device.protocol import Device, StagingBlock
from pelton.errors import IntegrityError
from pelton.ops.step_kernels import step_kernel
from pelton.setup.check import check_device
from pelton.worker.facts import device_facts

# name -> rows, words of each.
CASES = {"1x4": (1, 4), "1x4608": (1, 4608), "4x4608": (4, 4608), "1x1M": (1, 2**20)}
ARRIVALS = {"64x100": (64, 100)}
GROWTHS = ("steady", "first", "boundary")


class Timed(Protocol):
    """All that the harness knows of what it measures."""

    @property
    def name(self) -> str: ...

    def prepare(self, num_words: int) -> None:
        """Host memory for so many words is there before the clock starts; 0: none is."""
        ...

    def run(self, clock: Clock) -> None:
        """Everything up to the last launch, one lap for each phase."""
        ...


class Way(Timed, Protocol):
    """A way into a table."""

    def table(self) -> torch.Tensor:
        """[rows, words] int32 of the device."""
        ...


class _Table:
    def __init__(self, device: Device, rows: Int32Array) -> None:
        self._device = device
        self._rows = rows
        self._table = device.zeros((rows.size,), torch.int32)
        self._kernel = step_kernel("staged_write", device.torch_device.type)
        n = len(rows)
        self._targets = np.arange(n, dtype=np.int32) * rows.shape[1]
        self._cu_lens = np.arange(n + 1, dtype=np.int32) * rows.shape[1]

    def table(self) -> torch.Tensor:
        return self._table.view(*self._rows.shape)

    def _launch(self, writes: torch.Tensor) -> None:
        self._device.launch(self._kernel, self._table, writes, len(self._rows))


class Copied(_Table):
    """A new host buffer and a new device buffer each time."""

    def __init__(self, device: Device, rows: Int32Array, *, as_lists: bool) -> None:
        super().__init__(device, rows)
        self.name = f"{'list' if as_lists else 'array'}, copy"
        self._lists = rows.tolist() if as_lists else None
        self._is_pinned = device.torch_device.type == "cuda"

    def prepare(self, num_words: int) -> None:
        return None

    def run(self, clock: Clock) -> None:
        if self._lists is not None:
            words: list[int] = [*self._targets.tolist(), *self._cu_lens.tolist()]
            for row in self._lists:
                words.extend(row)
            clock.lap("convert")
            host = torch.tensor(words, dtype=torch.int32, pin_memory=self._is_pinned)
        else:
            arrays = [self._targets, self._cu_lens, *self._rows]
            clock.lap("convert")
            size = sum(map(len, arrays))
            host = torch.empty(size, dtype=torch.int32, pin_memory=self._is_pinned)
            np.concatenate(arrays, out=host.numpy())
        clock.lap("write")
        writes = self._device.empty((len(host),), torch.int32)
        self._device.copy_to_device(writes, host)
        self._launch(writes)
        clock.lap("launch")


class Ring(_Table):
    """One block, used again when the device has read it."""

    def __init__(self, device: Device, rows: Int32Array, *, as_lists: bool) -> None:
        super().__init__(device, rows)
        self.name = f"{'list' if as_lists else 'array'}, ring"
        self._lists = rows.tolist() if as_lists else None
        self._block: StagingBlock | None = None

    def prepare(self, num_words: int) -> None:
        if num_words == 0:
            self._block = None
        elif self._block is None or len(self._block.words) != num_words:
            self._block = self._device.staging_block(num_words)

    def run(self, clock: Clock) -> None:
        arrays = [self._targets, self._cu_lens, *self._rows]
        if self._lists is not None:
            words: list[int] = []
            for row in self._lists:
                words.extend(row)
            arrays[2:] = [np.array(words, np.int32)]
        clock.lap("convert")
        size = sum(map(len, arrays))
        if self._block is None or len(self._block.words) < size:
            self._block = self._device.staging_block(1 << (size - 1).bit_length())
        np.concatenate(arrays, out=self._block.words[:size])
        clock.lap("write")
        self._launch(self._block.publish(size))
        clock.lap("launch")


class Engine:
    """The engine's own staging: `stage` is convert, `flush` is launch with the write in it."""

    name = "engine"

    def __init__(self, device: Device, rows: Int32Array) -> None:
        self._device = device
        self._rows = rows
        self._table = device.zeros((0,), torch.int32)
        self._make(1)

    def _make(self, least_words: int) -> None:
        self._staging = Staging(self._device, 0, least_words)
        num_rows, width = self._rows.shape
        self._staged = self._staging.tensor("rows", num_rows, width, torch.int32)
        self._staging.allocate()

    def prepare(self, num_words: int) -> None:
        if num_words == 0:
            self._make(1)
        elif self._staging.stats.host_bytes != 4 * num_words:
            self._make(num_words)
            step = self._staging.begin()
            self._staged.stage(0, 0, self._rows[0, :1])
            self._staging.flush(step)
            step.release()
            self._device.synchronize()

    def run(self, clock: Clock) -> None:
        step = self._staging.begin()
        for row, words in enumerate(self._rows):
            self._staged.stage(row, 0, words)
        clock.lap("convert")
        self._staging.flush(step)
        step.release()
        clock.lap("launch")

    def table(self) -> torch.Tensor:
        return self._staged.tensor


def ways(device: Device, rows: Int32Array) -> list[Way]:
    """rows: [n, words]."""
    return [
        Copied(device, rows, as_lists=True),
        Copied(device, rows, as_lists=False),
        Ring(device, rows, as_lists=True),
        Ring(device, rows, as_lists=False),
        Engine(device, rows),
    ]


def measure(
    device: Device,
    sides: Sequence[Timed],
    num_words: int,
    *,
    num_iters: int,
    num_warmup: int,
) -> list[dict[str, float]]:
    """For each way its seconds by phase and in total: medians. num_words: prepared before each."""

    def once(side: Timed) -> dict[str, float]:
        side.prepare(num_words)
        device.synchronize()
        clock = Clock()
        side.run(clock)
        device.synchronize()
        clock.lap("device")
        return clock.seconds | {"total": sum(clock.seconds.values())}

    found = alternate(sides, once, num_warmup=num_warmup, num_iters=num_iters)
    return [
        {name: float(np.median([one[name] for one in samples])) for name in samples[0]}
        for samples in found
    ]


def run(options: StagingOptions) -> dict[str, Any]:
    """Measure, print, and write the result file if one is named.

    Raises IntegrityError when a way brings other words than the rows', ConfigError for a device
    that is not here.
    """
    report.check_writable(options.json)
    check_device(options.device)
    name = options.device if options.device != "auto" else device_facts("auto").kind
    device = named_device(name, num_threads=1, staging_mode=options.staging_mode)
    facts = machine.facts(device.torch_device)
    print(
        f"machine   {facts.cpu}, {facts.gpu or 'no GPU used'}; torch {facts.torch}, "
        f"pelton {facts.pelton} ({facts.commit or 'no commit'})\n"
        f"command   {report.command()}\n{device.describe_staging()}\n"
        f"microseconds, medians of {options.num_iters}"
    )
    print(f"{'case':8}{'block':10}{'way':14}" + "".join(f"{p:>10}" for p in (*PHASES, "total")))
    results: dict[str, Any] = {}
    results_of_paths: dict[str, dict[str, float]] = {}
    generator = np.random.default_rng(0)
    with torch.inference_mode():
        for case, shape in (CASES | ARRIVALS).items():
            rows = generator.integers(0, 150_000, shape, dtype=np.int32)
            sides = ways(device, rows)
            size = rows.size + 2 * len(rows) + 1
            fits, below = 1 << (size - 1).bit_length(), 1 << ((size - 1).bit_length() - 1)
            for growth, num_words in zip(GROWTHS, (fits, 0, below), strict=True):
                found = measure(
                    device,
                    sides,
                    num_words,
                    num_iters=options.num_iters,
                    num_warmup=options.num_iters_warmup,
                )
                for side, seconds in zip(sides, found, strict=True):
                    _check(device, side, rows)
                    results.setdefault(case, {}).setdefault(growth, {})[side.name] = seconds
                    numbers = "".join(f"{1e6 * value:10.1f}" for value in seconds.values())
                    print(f"{case:8}{growth:10}{side.name:14}{numbers}")
        others = paths(device)
        found = measure(
            device, others, 0, num_iters=options.num_iters, num_warmup=options.num_iters_warmup
        )
        for path, seconds in zip(others, found, strict=True):
            results_of_paths[path.name] = seconds
            numbers = "".join(f"{1e6 * value:10.1f}" for value in seconds.values())
            print(f"{'other':18}{path.name:14}{numbers}")
    ratio = {
        case: found["steady"]["list, copy"]["total"] / found["steady"]["array, ring"]["total"]
        for case, found in results.items()
    }
    print("list, copy / array, ring: " + ", ".join(f"{k} {v:.2f}" for k, v in ratio.items()))
    result = {
        "command": report.command(),
        "machine": dataclasses.asdict(facts),
        "options": dataclasses.asdict(options),
        "staging": device.describe_staging(),
        "seconds": results,
        "other_paths": results_of_paths,
        "list_copy_over_array_ring": ratio,
    }
    report.write_json(options.json, result)
    return result


def _check(device: Device, side: Way, rows: Int32Array) -> None:
    table = side.table()
    host = device.host_buffer(tuple(table.shape), torch.int32)
    device.copy_to_host(host, table)
    device.synchronize()
    if not np.array_equal(host.numpy(), rows):
        raise IntegrityError(f"{side.name} brought other words than the rows'")
