"""A worker's process: `python -m pelton.worker.process SPEC`, started by WorkerGroup.

It reads orders from the ring that all workers of the host read, and runs them in that order; the
rank that answers writes what each step yielded into another ring. All else that it has to say, once
when it is ready and once when it fails, goes through its control connection, whose other end is the
parent's: when that closes, this process ends.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from pelton.config.env import checks_plans
from pelton.worker.board import Board, BoardWriter
from pelton.worker.orders import Close, RecordNext, Setup, Spec, WorkerFailed, WorkerReady
from pelton.worker.ring import RingReader, RingWriter

EXIT_FAULT = 70
"""After a failure was told; EX_SOFTWARE of sysexits.h."""


def main(spec: Spec) -> int:
    """The whole life of the process; returns its exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it hangs, for whoever asks
    control: Connection[Any, Any] = Connection(spec.control)
    threading.Thread(target=_watch_parent, args=(control,), name="parent", daemon=True).start()
    board = Board(spec.board, spec.num_ranks).writer(spec.rank)
    board.note("starting")
    board.start_beating()
    try:
        _run(spec, control, board)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        told = WorkerFailed(kind=type(error).__name__, message=str(error), traceback=text)
        control.send(told)
        return EXIT_FAULT
    return 0


def _run(spec: Spec, control: Connection[Any, Any], board: BoardWriter) -> None:
    orders = RingReader(spec.orders, spec.rank)
    setup = pickle.loads(orders.read())
    assert isinstance(setup, Setup)
    logging.basicConfig(format=f"%(levelname)s rank {spec.rank}: %(message)s")
    # What all ranks would say, one says.
    level = setup.log_level if spec.rank == 0 else max(setup.log_level, logging.WARNING)
    logging.getLogger("pelton").setLevel(level)
    for name, entries in setup.tables.items():
        module, _, table = name.partition(":")
        getattr(importlib.import_module(module), table).update(entries)

    from pelton.worker.rank import make_rank  # torch

    rank = make_rank(setup.config, setup.checkpoint, spec.rank, setup.meeting, board.note)
    worker = rank.worker
    control.send(
        WorkerReady(
            config=worker.config,
            groups=worker.groups,
            move_costs=worker.move_costs,
            phases=worker.phases,
        )
    )
    answers = RingWriter(spec.answers) if rank.place.answers else None
    pending: deque[Any] = deque()
    compares, depth = checks_plans(), setup.config.scheduler.max_steps_in_flight
    while True:
        # An order that is there comes before a result that is not: the device must have its next
        # step before it ends this one. It is looked for without sleep, for a step takes less time
        # than to wake up.
        while len(pending) >= depth or (pending and not orders.has_message()):
            if len(pending) < depth and not pending[0].is_done():
                os.sched_yield()
                continue
            answer = pending.popleft().collect()
            if answers is not None:
                answers.write(pickle.dumps(answer, pickle.HIGHEST_PROTOCOL))
        told = orders.read()
        order = pickle.loads(told)
        if compares and not isinstance(order, Close):
            rank.compare(told)
        if isinstance(order, Close):
            break
        if isinstance(order, RecordNext):
            pending.append(_Known(worker.record_next()))
            continue
        plan = order.whole_plan()
        board.begin_step(plan.step)
        board.note("launching")
        pending.append(worker.execute(plan))
        # While the device is busy; all ranks do it after the same step.
        worker.record_next()
        board.note("waiting for orders")
    worker.close()
    rank.leave()


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer that is there already."""

    value: Any

    def is_done(self) -> bool:
        return True

    def collect(self) -> Any:
        return self.value


def _watch_parent(control: Connection[Any, Any]) -> None:
    """The parent never writes to its end, so reading ends with the parent, however it ends."""
    try:
        control.poll(None)
    finally:
        os._exit(1)


if __name__ == "__main__":
    exit_code = main(pickle.loads(bytes.fromhex(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
