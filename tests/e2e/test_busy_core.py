"""Another process takes one of two cores: a step gets slower, as there is less to run on."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys

import pytest

from pelton.device.native.library import library

ENGINE = """
import os, sys, time
os.sched_setaffinity(0, map(int, sys.argv[1:]))
from pelton import LLM, SamplingParams
llm = LLM(max_num_seqs=1, max_model_len=256, num_threads=2)
params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
llm.generate("Once", params, use_tqdm=False)
print("ready", flush=True)
for _ in sys.stdin:
    started = time.perf_counter()
    llm.generate("Once upon a time", params, use_tqdm=False)
    print(48 / (time.perf_counter() - started), flush=True)
"""
HOG = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
while True:
    pass
"""


@pytest.mark.long
@pytest.mark.skipif(library() is None, reason="no library of CPU kernels")
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
def test_a_step_slows_down_in_proportion() -> None:
    """With and without in turns. A core and a half are left, and a part under way is waited for:
    0.46 to 0.59 of the speed on the 2-core Xeon."""
    cores = sorted(map(str, os.sched_getaffinity(0)))[:2]
    if len(cores) < 2:
        pytest.skip("one core")
    hog = subprocess.Popen([sys.executable, "-c", HOG, cores[1]])
    hog.send_signal(signal.SIGSTOP)
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, *cores],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"

        def speed() -> float:
            print("go", file=engine.stdin, flush=True)
            return float(engine.stdout.readline())

        ratios = []
        for _ in range(7):
            alone = speed()
            hog.send_signal(signal.SIGCONT)
            beside = speed()
            hog.send_signal(signal.SIGSTOP)
            ratios.append(beside / alone)
    finally:
        for process in (engine, hog):
            process.kill()
            process.wait(20)
    print("of the speed, beside a busy process:", " ".join(f"{ratio:.2f}" for ratio in ratios))
    assert statistics.median(ratios) >= 0.35
