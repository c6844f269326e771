from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pelton.tokens.threads import step_back


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has priorities of threads")
def test_a_thread_steps_back_alone() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    with ThreadPoolExecutor(1, initializer=step_back) as pool:
        assert pool.submit(priority).result() == max(before, 10)
    assert priority() == before
