"""Recording the ladder of shapes, once everything is warm."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from pelton.core.descriptor import Descriptor
from pelton.core.plan import StepPlan
from pelton.device.made import Made
from pelton.device.protocol import Device, MeasuredDevice
from pelton.forward.dispatch import FEW_ROWS
from pelton.forward.executor import Executor
from pelton.runner.model_runner import ModelRunner

Keys = Sequence[tuple[Descriptor, bool]]

# Of a step that is recorded before the first request: a short prompt. A longer one hides most of
# the time that it takes to launch its kernels one by one.
_FIRST_TOKENS = 256
# Tokens of a step of one row, each of which may take another kernel of attention.
_SHORT = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """num_recorded: recordings that were made, in so many seconds; warm_seconds of them went by in
    launching each shape once before. made: beside launches, where nothing should be."""

    num_recorded: int
    seconds: float
    warm_seconds: float
    made: Made

    def describe(self) -> str:
        """A line for people."""
        return (
            f"recorded  {self.num_recorded} shapes of steps in {self.seconds:.2f} s "
            f"(to warm them {self.warm_seconds:.2f} s)"
        )


def rehearse(
    device: Device,
    runner: ModelRunner,
    executor: Executor,
    max_tokens: int,
    plans: Sequence[StepPlan],
) -> None:
    """Have the kernels compiled that steps of all sizes need: of each class a shape for every power
    of two, steps too large for the ladder, and one row's short ones, which are launched, too.

    max_tokens: of a step. plans: of synthetic steps whose kernels are needed, too.
    """
    keys = executor.unrecorded()
    chosen = {
        (shape.uniform_query_len, shape.num_tokens.bit_length(), shape.num_rows <= FEW_ROWS): shape
        for shape, is_sampled in keys[::-1]
        if is_sampled
    }
    shapes = list(chosen.values())
    for largest in {shape.num_rows: shape for shape in shapes}.values():
        tokens = max(max_tokens, largest.num_rows)
        shapes.append(_launched(largest, num_tokens=tokens, num_rows=largest.num_rows))
    for shape in shapes[:1]:
        shapes += [_launched(shape, num_tokens=n, num_rows=1) for n in _SHORT if n <= max_tokens]
    runner.rest()
    with device.rehearsing():
        for shape in shapes:
            executor.warm(shape, is_sampled=True)
        for plan in plans:
            runner.finish(runner.start(plan)).collect()
    runner.rest()  # what the plans staged was compiled, and not written
    device.synchronize()


def _launched(shape: Descriptor, *, num_tokens: int, num_rows: int) -> Descriptor:
    """A step that is not recorded; of one row, which is then a short prompt."""
    return replace(
        shape,
        mode="eager",
        num_tokens=num_tokens,
        num_rows=num_rows,
        uniform_query_len=num_tokens if num_rows == 1 else 0,
        max_query_len=num_tokens,
        max_seq_len=num_tokens if num_rows == 1 else shape.max_seq_len,
    )


class Recorder:
    """Records the ladder: at start what the first requests need, and the rest bit by bit."""

    def __init__(self, device: Device, runner: ModelRunner, executor: Executor) -> None:
        self._device = device
        self._runner = runner
        self._executor = executor
        self._left = [] if device.records_when_asked else executor.unrecorded()
        self._later = Made()

    def record_first(self) -> CaptureReport:
        """Few rows and tokens, the head recorded, too."""
        first = [
            (shape, is_sampled)
            for shape, is_sampled in self._left
            if is_sampled and shape.num_rows <= FEW_ROWS and shape.num_tokens <= _FIRST_TOKENS
        ]
        self._left = [key for key in self._left if key not in first]
        report = _record(self._device, self._runner, self._executor, first)
        _tell(report.made)
        return report

    def record_next(self) -> bool:
        """One more; False if all are recorded. It waits for nothing on the device. Where memory is
        short the rest of the ladder is left out, and a warning says so."""
        if not self._left:
            return False
        try:
            key = self._left.pop(0)
            self._later += _record(self._device, self._runner, self._executor, [key]).made
        except torch.OutOfMemoryError:
            logging.getLogger("pelton").warning(
                "no memory for %d more CUDA graphs: steps of their sizes are launched op by op; a "
                "lower gpu_memory_utilization leaves more.",
                len(self._left) + 1,
            )
            self._left = []
        if not self._left:
            _tell(self._later)
        return bool(self._left)


def record_largest(device: MeasuredDevice, runner: ModelRunner, executor: Executor) -> int:
    """Record the largest shape of each class, so that the device has the memory that all recordings
    share, and one more. Returns the bytes that each further recording costs beside it."""
    largest: dict[tuple[int, bool], tuple[Descriptor, bool]] = {}
    for shape, is_sampled in executor.unrecorded():
        largest[shape.uniform_query_len, is_sampled] = shape, is_sampled
    keys = sorted(largest.values(), key=lambda key: -key[0].num_tokens)
    _record(device, runner, executor, keys)
    before = device.memory()[0]
    _record(device, runner, executor, executor.unrecorded()[-1:])
    return device.memory()[0] - before


def _record(device: Device, runner: ModelRunner, executor: Executor, keys: Keys) -> CaptureReport:
    """Each is launched once before, on padding alone, so that its kernels are compiled and loaded
    and libraries have their workspaces."""
    started = time.perf_counter()
    if keys:
        runner.rest()
        for shape, is_sampled in keys:
            executor.warm(shape, is_sampled)
    warm = time.perf_counter()
    before = device.made_in_recordings
    with _no_collection():
        for shape, is_sampled in keys:
            executor.record(shape, is_sampled)
    return CaptureReport(
        num_recorded=len(keys),
        seconds=time.perf_counter() - started,
        warm_seconds=warm - started,
        made=device.made_in_recordings - before,
    )


def _tell(made: Made) -> None:
    """Kernels of torch have no memory given to them, and take some of the recordings' own. All
    else should have been there."""
    if made:
        is_expected = made == Made(allocations=made.allocations)
        logging.getLogger("pelton").log(
            logging.INFO if is_expected else logging.WARNING,
            "while steps were recorded something was made: %s%s.",
            made.describe(),
            "" if is_expected else "; it should have been there before, please report it",
        )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector frees in the midst of a capture may belong to the device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
