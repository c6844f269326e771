"""Several workers in processes of their own, in the place of one (worker.py). No torch."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from pelton import errors
from pelton.checkpoint.source import Checkpoint
from pelton.config.engine import EngineConfig
from pelton.core.kv.host_pages import MoveCosts
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import StepPlan, StepResult
from pelton.errors import ConfigError, DeviceLost, EngineError, PeltonError
from pelton.parallel.mesh import places
from pelton.worker.board import Board, make_board
from pelton.worker.orders import (
    Close,
    Order,
    RecordNext,
    Setup,
    Spec,
    Step,
    WorkerFailed,
    WorkerReady,
)
from pelton.worker.ring import RingReader, RingWriter, make_ring

_LOOK_SECONDS = 0.5
"""Between looks at who still moves."""
_SILENCE_SECONDS = 6.0
"""Without a beat for so long, a worker is stopped, or its machine is."""
_GRACE_SECONDS = 0.3
"""For the news of the first fault, where several come together."""
_PATIENCE = 5.0
"""Seconds from asking the workers to stop to killing them."""
_START_SECONDS = 3600.0
"""Loading may take long."""

_log = logging.getLogger("pelton")


class GroupOutcome:
    """A step of the group on its way to a result; outcomes are collected in their order."""

    def __init__(self, group: WorkerGroup, step: int) -> None:
        self._group = group
        self._step = step

    def is_done(self) -> bool:
        return self._group.has_answer()

    def collect(self) -> StepResult:
        result: StepResult = self._group.next_answer()
        assert result.step == self._step, "answers come in the order of the steps"
        return result


class WorkerGroup:
    """Starts a process for each rank, tells all of them what to do, and watches them.

    A rank that dies, fails, is stopped or does not end a step in time ends the group: all its
    processes are killed, and whoever waits for it, or asks it for more, gets DeviceLost with the
    reason. `listen` is for who does neither.

    phases: seconds of each start phase, of the slowest rank. The other attributes are a Worker's.

    Raises what a worker raises while it starts.
    """

    runs_inline = False

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, tables: Any = None) -> None:
        self._failure: EngineError | PeltonError | None = None
        self._on_failure: Callable[[Exception], object] = lambda error: None
        self._asked: deque[float] = deque()  # when each order was given that is not answered
        self._lock = threading.Lock()
        self._is_closing = False
        self._ready: dict[int, WorkerReady] = {}
        self._ready_changed = threading.Condition(self._lock)
        self._everyone = places(config.parallel)
        self._timeout = config.parallel.step_timeout
        self._folder = tempfile.mkdtemp(prefix="pelton-")
        num_ranks = len(self._everyone)
        orders, answers = make_ring(num_ranks), make_ring(1)
        board = make_board(num_ranks)
        self._board = Board(board, num_ranks)
        self._orders = RingWriter(orders, self._raise_failure)
        self._answers = RingReader(answers, 0)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[Connection[Any, Any]] = []
        shared_by_all = (*orders.descriptors, *answers.descriptors, board)
        weakref.finalize(self, _close_all, shared_by_all)
        try:
            for place in self._everyone:
                ours, theirs = socket.socketpair()
                self._controls.append(Connection(ours.detach()))
                spec = Spec(
                    rank=place.rank,
                    num_ranks=num_ranks,
                    control=theirs.fileno(),
                    board=board,
                    orders=orders,
                    answers=answers,
                )
                shared = (*shared_by_all, theirs.fileno())
                with theirs:
                    self._processes.append(_spawn(spec, shared))
            threading.Thread(target=self._watch_all, name="pelton-workers", daemon=True).start()
            meeting = os.path.join(self._folder, "meeting")
            setup = Setup(
                config=config,
                checkpoint=checkpoint,
                meeting=meeting,
                log_level=_log.getEffectiveLevel(),
                tables=tables or {},
            )
            self._order(setup)
            ready = self._wait_until_ready()
        except BaseException:
            self._kill()
            raise
        first = ready[0]
        self.config: EngineConfig = first.config
        self.groups: tuple[KVGroup, ...] = first.groups
        self.move_costs: MoveCosts = first.move_costs
        self.phases = {
            name: max(one.phases.get(name, 0.0) for one in ready) for name in first.phases
        }

    def listen(self, on_failure: Callable[[Exception], object]) -> None:
        """Call `on_failure`, from another thread, with what ends the group."""
        with self._lock:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def execute(self, plan: StepPlan) -> GroupOutcome:
        """Queue a step on all ranks; its result is collected from what this returns."""
        self._order(Step.of(plan))
        return GroupOutcome(self, plan.step)

    def record_next(self) -> bool:
        """As Worker.record_next, on all ranks; nothing is done while steps are in flight."""
        if self._asked:
            return False
        self._order(RecordNext())
        return bool(self.next_answer())

    def has_answer(self) -> bool:
        return self._failure is not None or self._answers.has_message()

    def next_answer(self) -> Any:
        """Wait for it. Raises DeviceLost when the group has failed."""
        answer = pickle.loads(self._answers.read(self._raise_failure))
        with self._lock:
            self._asked.popleft()
            if self._asked:
                self._asked[0] = time.monotonic()  # the time of a step begins with its turn
        return answer

    def close(self) -> None:
        """Ask the workers to end, then see to it."""
        if self._failure is None:
            self._is_closing = True  # first, lest the watcher take their end for a fault
            with suppress(EngineError):
                self._order(Close())
            deadline = time.monotonic() + _PATIENCE
            for process in self._processes:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(deadline - time.monotonic(), 0.0))
        self._kill()

    def _order(self, order: Order) -> None:
        self._raise_failure()
        if isinstance(order, Step | RecordNext):
            with self._lock:
                self._asked.append(time.monotonic())
        self._orders.write(pickle.dumps(order, pickle.HIGHEST_PROTOCOL))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_until_ready(self) -> list[WorkerReady]:
        """The watcher reads what the workers say."""
        deadline = time.monotonic() + _START_SECONDS
        with self._ready_changed:
            while len(self._ready) < len(self._everyone) and self._failure is None:
                self._ready_changed.wait(deadline - time.monotonic())
        self._raise_failure()
        return [self._ready[place.rank] for place in self._everyone]

    def _watch_all(self) -> None:
        """A thread."""
        try:
            self._watch()
        except Exception as error:
            self._fail(DeviceLost(f"The workers were not understood: {error!r}"))

    def _watch(self) -> None:
        """What the workers say, and whether they still move, until one fails."""
        while not self._is_closing:
            failed: dict[int, WorkerFailed | None] = {}
            for rank in self._speaking(_LOOK_SECONDS):
                self._hear(rank, failed)
            if self._is_closing:
                return
            if failed:
                # The others learn of it as a broken connection, perhaps at once: hear who is first.
                time.sleep(_GRACE_SECONDS)
                for rank in self._speaking(0):
                    if rank not in failed:
                        self._hear(rank, failed)
                self._fail(self._reason(failed))
                return
            reason = self._who_is_stuck()
            if reason is not None:
                self._fail(DeviceLost(reason))
                return

    def _speaking(self, timeout: float) -> list[int]:
        """Ranks that have something to say, or are gone."""
        ready = wait(self._controls, timeout)
        return [rank for rank, control in enumerate(self._controls) if control in ready]

    def _hear(self, rank: int, failed: dict[int, WorkerFailed | None]) -> None:
        """Enter what the rank says; None in `failed`: it went without a word."""
        try:
            message = self._controls[rank].recv()
        except (EOFError, OSError):
            failed[rank] = None
            return
        if isinstance(message, WorkerFailed):
            failed[rank] = message
            return
        with self._ready_changed:
            self._ready[rank] = message
            self._ready_changed.notify_all()

    def _reason(self, failed: dict[int, WorkerFailed | None]) -> EngineError | PeltonError:
        for rank, said in failed.items():
            if said is None:
                process = self._processes[rank]
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
                return DeviceLost(
                    f"The worker of rank {rank} (process {process.pid}) {_how_it_ended(process)}. "
                    f"{self._where()}"
                )
        rank, told = next(iter(failed.items()))
        assert told is not None
        kind = getattr(errors, told.kind, None)
        if isinstance(kind, type) and issubclass(kind, ConfigError):
            return kind(told.message)
        _log.error("The worker of rank %d failed:\n%s", rank, told.traceback)
        return DeviceLost(
            f"The worker of rank {rank} (process {self._processes[rank].pid}) failed: {told.kind}: "
            f"{told.message}"
        )

    def _who_is_stuck(self) -> str | None:
        for place in self._everyone:
            if self._board.silence(place.rank) > _SILENCE_SECONDS:
                return (
                    f"The worker of rank {place.rank} (process {self._processes[place.rank].pid}) "
                    f"has not moved for {_SILENCE_SECONDS:.0f} s: it is stopped. {self._where()}"
                )
        with self._lock:
            waits = time.monotonic() - self._asked[0] if self._asked else 0.0
        if waits > self._timeout:
            return f"A step has not ended after {self._timeout:.0f} s. {self._where()}"
        return None

    def _where(self) -> str:
        """Where each rank stands: the one that differs is the one to look at."""
        return "; ".join(self._board.describe(place.rank) for place in self._everyone) + "."

    def _fail(self, failure: EngineError | PeltonError) -> None:
        self._kill()
        with self._ready_changed:
            self._failure = failure
            self._ready_changed.notify_all()
            on_failure = self._on_failure
        on_failure(failure)
        self._answers.ring_bell()

    def _kill(self) -> None:
        """All processes, at once; they are gone afterwards."""
        self._is_closing = True
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.returncode
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _close_all(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _spawn(spec: Spec, descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pelton.worker.process", pickle.dumps(spec).hex()],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what it prints is talk
        pass_fds=descriptors,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
