"""What is made beside launches."""

from __future__ import annotations

import os
import threading

from pelton.device.made import Made, host_made


def test_differences():
    before = Made(allocations=3, segments=1, threads=4, files=9)
    after = Made(allocations=3, segments=1, threads=5, files=11)
    assert not after - after
    made = after - before
    assert made == Made(threads=1, files=2)
    assert made + made == Made(threads=2, files=4)
    assert made.describe() == "1 threads, 2 files"


def test_threads_and_files_of_this_process():
    before = host_made()
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    ends = os.pipe()
    try:
        assert host_made() - before == Made(threads=1, files=2)
    finally:
        end.set()
        thread.join()
        for one in ends:
            os.close(one)
