"""The pool of threads: every part once, whoever runs it, and nobody is waited for in vain."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from pelton.device.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


def run_region(work) -> None:
    """work(part, parts), once per part."""
    found = library()
    assert found is not None
    task = TASK(lambda argument, part, parts: work(part, parts))
    found.functions.pelton_run(task, None)


@pytest.fixture
def threads():
    found = library()
    assert found is not None
    yield found.set_num_threads
    found.set_num_threads(torch.get_num_threads())


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_part_runs_once(threads, count):
    threads(count)
    for _ in range(200):
        seen: list[tuple[int, int]] = []
        run_region(lambda *found, seen=seen: seen.append(found))
        assert sorted(seen) == [(part, count) for part in range(count)]


def test_parts_run_side_by_side(threads):
    """Each waits for the other: one thread would wait for ever."""
    threads(2)
    barrier = threading.Barrier(2, timeout=20)
    for _ in range(5):
        waited: list[int] = []

        def work(part: int, parts: int, waited: list[int] = waited) -> None:
            try:
                barrier.wait()
                waited.append(part)
            except threading.BrokenBarrierError:
                pass

        run_region(work)
        assert sorted(waited) == [0, 1]


_BUSY = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_another_process_on_a_core_does_not_stop_the_pool(threads):
    """Two threads share one core with somebody who never rests. A barrier between them would cost a
    time slice of some milliseconds each time, 5,000 of them more than the deadline."""
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    other = subprocess.Popen([sys.executable, "-c", _BUSY, str(core)])
    try:
        os.sched_setaffinity(0, {core})
        threads(4)  # new threads, which the affinity holds for
        started = time.monotonic()
        nothing = ctypes.cast(ctypes.CDLL(None).labs, TASK)  # of C: no interpreter's lock
        for _ in range(5000):
            library().functions.pelton_run(nothing, None)
        assert time.monotonic() - started < 12
    finally:
        os.sched_setaffinity(0, allowed)
        other.send_signal(signal.SIGKILL)
        other.wait(20)
