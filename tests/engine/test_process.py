"""Real processes: what ends with what, in every phase, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine.test_async_llm import collect, run
from engine.test_llm import SETTINGS, TEXTS, folder, make_llm
from support.plain import greedy, seeded
from support.pooled import cosine, hidden_states, tiny_pooled
from support.sabotage import TARGET
from support.tiny import prompts_of

from pelton.config.engine import EngineArgs
from pelton.config.pooling import PoolingParams
from pelton.engine import client
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.client import EngineProcess
from pelton.errors import ConfigError, EngineDead
from pelton.sampling.table import PROCESSORS

LIMIT = 5.0
"""Seconds after which nothing may be left."""


def args(**changes: Any) -> EngineArgs:
    return EngineArgs(model=str(folder()), **{**SETTINGS, "batch_invariant": True, **changes})


def is_gone(pid: int) -> bool:
    """A zombie counts as gone: it holds nothing, and whoever adopted it may never look."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until_gone(pid: int, sockets: Path) -> None:
    deadline = time.monotonic() + LIMIT
    while not is_gone(pid) or sockets.exists():
        assert time.monotonic() < deadline, (pid, list(sockets.parent.glob(f"{sockets.name}/*")))
        time.sleep(0.02)


def process_of(llm: AsyncLLM) -> EngineProcess:
    link = llm._link
    assert isinstance(link, EngineProcess)
    return link


@pytest.fixture
def saboteur(monkeypatch: Any) -> None:
    monkeypatch.setitem(PROCESSORS, "sabotage", TARGET)


def saboteurs(how: str, max_tokens: int | None = None, **changes: Any) -> Any:
    return greedy(max_tokens, logits_processors={"sabotage": {"how": how}}, **changes)


def test_a_life(saboteur):
    """Start, the offline engine's answers, deaf to signals, requests that a parent cannot check,
    and an end that leaves nothing."""
    params = [greedy(), seeded(seed=4, n=3, logprobs=2), greedy(stop=["e"]), seeded(seed=9)]
    offline = make_llm(batch_invariant=True)
    wanted = [
        offline.generate(text, one, use_tqdm=False)[0].outputs for text, one in zip(TEXTS, params)
    ]
    phases: list[str] = []

    async def main() -> None:
        llm = await AsyncLLM.start(args(), on_phase=lambda name, seconds: phases.append(name))
        pid = process_of(llm).pid
        assert not process_of(llm)._folder.exists()
        assert list(llm.facts.start_times) == ["check", *phases]
        assert phases == [
            "process", "imports", "device", "configuration", "build model", "load weights",
            "choose kernels", "allocate", "warm up",
        ]  # fmt: skip
        assert llm.config == offline.config
        assert llm.facts.vocab_size == 300
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        found = await asyncio.gather(
            *(
                collect(llm, str(index), one, prompt=text)
                for index, (text, one) in enumerate(zip(TEXTS, params))
            )
        )
        for (outputs, _), whole in zip(found, wanted, strict=True):
            for output, other in zip(outputs, whole, strict=True):
                assert (output.text, output.token_ids) == (other.text, other.token_ids)
                assert output.logprobs == other.logprobs
                assert output.finish_reason == other.finish_reason
        (output,), _ = await collect(llm, "slow", saboteurs("sleep:0.001", 3))
        assert len(output.token_ids) == 3
        while llm.stats().scheduler.num_running:
            await asyncio.sleep(0.01)
        assert llm.is_alive
        assert await llm.reset_prefix_cache()
        await llm.close()
        await llm.close()
        assert is_gone(pid)
        assert not llm.is_alive

    run(main, 120)
    offline.close()


@pytest.mark.parametrize("phase", ["spawned", "process", "imports"])
def test_the_engine_is_killed_while_it_starts(phase, monkeypatch):
    pids: list[int] = []
    spawn = subprocess.Popen

    def told(*given: Any, **options: Any) -> Any:
        process = spawn(*given, **options)
        pids.append(process.pid)
        if phase == "spawned":
            process.kill()
        return process

    monkeypatch.setattr(client.subprocess, "Popen", told)

    def on_phase(name: str, seconds: float) -> None:
        if name == phase:
            os.kill(pids[0], signal.SIGKILL)

    async def main() -> None:
        with pytest.raises(EngineDead, match="killed by signal 9"):
            await AsyncLLM.start(args(), on_phase=on_phase)
        assert is_gone(pids[0])

    run(main, 60)


def test_an_engine_of_two_workers_lives_and_dies_with_them():
    """The offline engine's answers; then one of the workers is killed while nothing is asked of
    them, which everybody hears by name, and nothing is left."""
    offline = make_llm(batch_invariant=True)
    wanted = offline.generate(TEXTS[0], greedy(), use_tqdm=False)[0].outputs[0]
    offline.close()

    async def main() -> None:
        llm = await AsyncLLM.start(args(tensor_parallel_size=2))
        (output,), _ = await collect(llm, "a", greedy(), prompt=TEXTS[0])
        assert (output.text, output.token_ids) == (wanted.text, wanted.token_ids)
        pid = process_of(llm).pid
        workers = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        deadline = time.monotonic() + LIMIT
        while llm.is_alive or not all(map(is_gone, (pid, *workers))):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        with pytest.raises(EngineDead, match=r"rank 1 .* was killed by SIGKILL"):
            await collect(llm, "b", greedy(), prompt=TEXTS[0])
        await llm.close()

    run(main, 120)


def test_an_engine_that_has_left_is_not_alive(saboteur):
    """Even while its last words are waited for."""

    async def main() -> None:
        llm = await AsyncLLM.start(args())
        pid = process_of(llm).pid
        asking = asyncio.create_task(collect(llm, "r", saboteurs("exit")))
        while not is_gone(pid):
            await asyncio.sleep(0.005)
        end = time.monotonic() + client._LAST_WORDS / 2
        while llm.is_alive:
            assert time.monotonic() < end
            await asyncio.sleep(0.005)
        with pytest.raises(EngineDead, match="exit code 3"):
            await asking
        await llm.close()

    run(main)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", "killed by signal 9"),
        pytest.param("exit", "exit code 3", marks=pytest.mark.long),
        pytest.param("segfault", "killed by signal 11", marks=pytest.mark.long),
        ("exception", "ZeroDivisionError: on purpose"),
        pytest.param("device", "the device is gone", marks=pytest.mark.long),
    ],
)
def test_the_engine_dies_at_work(how, text, saboteur):
    """Every open stream is told, at once; with what the process said last, if it said anything."""

    async def main() -> None:
        llm = await AsyncLLM.start(args())
        pid = process_of(llm).pid
        witnesses = [
            asyncio.create_task(collect(llm, f"w{i}", greedy(None), prompt=TEXTS[i]))
            for i in range(3)
        ]
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match=text) as caught:
            await collect(llm, "r", saboteurs(how))
        assert ("Traceback" in caught.value.child_traceback) == (how in ("exception", "device"))
        for result in await asyncio.gather(*witnesses, return_exceptions=True):
            # A witness may have come to its end before.
            assert isinstance(result, (EngineDead, tuple))
        assert not llm.is_alive
        assert text in str(await llm.died())
        with pytest.raises(EngineDead):
            await collect(llm, "late", greedy())
        assert not llm._streams
        await llm.close()
        assert is_gone(pid)

    run(main, 60)


@pytest.mark.parametrize("phase", ["spawned", "process", "imports", "idle", "generating"])
def test_the_parent_is_killed(phase, tmp_path):
    """kill -9 in each phase: within 5 s neither the engine's process nor its sockets are there, nor
    what it has started."""
    file = tmp_path / "pid"
    driver = subprocess.Popen(
        [sys.executable, "-m", "support.engine_driver", str(folder()), phase, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(tmp_path),
        },
    )
    assert driver.stdout is not None
    pid, sockets = driver.stdout.readline().split()
    assert driver.wait(60) == -signal.SIGKILL
    wait_until_gone(int(pid), Path(sockets))
    if phase == "generating":
        assert is_gone(int(file.read_text()))
        file.unlink()
    assert list(tmp_path.iterdir()) == []


def rss(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_cancelled_requests_leave_nothing(count):
    """Case 32: prompts of thousands of tokens, each left after 0 to 20 ms, half of them n=3."""

    async def main() -> None:
        llm = await AsyncLLM.start(
            args(
                hf_overrides={"max_position_embeddings": 8192},
                max_model_len=8192,
                num_gpu_blocks_override=4000,
                max_num_batched_tokens=512,
            )
        )
        pids = [os.getpid(), process_of(llm).pid]
        rng = random.Random(7)
        prompt = [rng.randrange(3, 300) for _ in range(5000)]

        async def one(index: int) -> None:
            params = seeded(None, n=rng.choice([1, 3]))
            # Other prompts, or else all but the first would be prefix hits.
            ids = [rng.randrange(3, 300), *prompt]
            with suppress(asyncio.TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 0.02)):
                    async for _ in llm.generate(ids, params, request_id=f"r{index}"):
                        pass

        async def some(first: int, last: int) -> None:
            for start in range(first, last, 20):
                await asyncio.gather(*(one(i) for i in range(start, min(start + 20, last))))
            while llm.stats().scheduler.num_running or llm.stats().scheduler.num_waiting:
                await asyncio.sleep(0.01)

        await some(0, 100)
        before = [rss(pid) for pid in pids]
        await some(100, count)
        after = [rss(pid) for pid in pids]
        assert not llm._streams
        assert not llm._answers
        assert not llm._silent
        assert llm.stats().scheduler.kv_usage == 0
        assert await llm.reset_prefix_cache()  # every block is free
        (output,), _ = await collect(llm, "after", greedy(), prompt=TEXTS[0])
        assert len(output.token_ids) == 12
        for now, then in zip(after, before, strict=True):
            assert now - then < 30e6, (before, after)
        await llm.close()

    run(main, 600)


def test_what_only_the_engine_finds_out_is_the_users_fault_all_the_same():
    async def main() -> None:
        with pytest.raises(ConfigError, match="raise num_gpu_blocks_override to 25") as caught:
            await AsyncLLM.start(args(num_gpu_blocks_override=20))
        assert type(caught.value) is ConfigError
        started = time.monotonic()
        with pytest.raises(ConfigError, match="max_num_seqs"):
            await AsyncLLM.start(args(max_num_seqs=0))
        assert time.monotonic() - started < 5

    run(main, 60)


def test_a_start_that_is_given_up_leaves_nothing(monkeypatch):
    pids: list[int] = []

    async def main() -> None:
        task = asyncio.create_task(
            AsyncLLM.start(args(), on_phase=lambda name, seconds: task.cancel())
        )
        spawn = EngineProcess.spawn

        async def told(*given: Any, **options: Any) -> EngineProcess:
            process = await spawn(*given, **options)
            pids.append(process.pid)
            return process

        monkeypatch.setattr(EngineProcess, "spawn", told)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_gone(pids[0])

    run(main, 60)


def test_an_engine_that_does_not_answer_is_killed(monkeypatch, saboteur, tmp_path):
    """It hangs in a step; closing waits a while, then kills it and what it has started."""
    monkeypatch.setattr(client, "_PATIENCE", 0.5)

    file = tmp_path / "pid"

    async def main() -> None:
        llm = await AsyncLLM.start(args())
        pid = process_of(llm).pid
        await collect(llm, "child", saboteurs(f"child:{file}", 1))
        task = asyncio.create_task(collect(llm, "r", saboteurs("sleep:600")))
        await asyncio.sleep(0.2)
        await llm.close()
        assert is_gone(pid)
        assert is_gone(int(file.read_text()))
        with pytest.raises(EngineDead, match="shut down"):
            await task

    run(main, 60)


def test_an_engine_that_pools():
    """What the methods are and need travels with READY; results come back with the ends."""
    folder_of_embedder = tiny_pooled("Qwen3")
    prompts = prompts_of([9, 30])

    async def main() -> None:
        llm = await AsyncLLM.start(
            EngineArgs(
                model=str(folder_of_embedder),
                device="cpu",
                num_threads=1,
                num_gpu_blocks_override=64,
                max_num_batched_tokens=8,
                max_num_seqs=4,
            )
        )
        try:
            assert llm.config.pooling.tasks == ("embed", "token_embed")
            assert llm.config.pooling.needs("step") == ("token_ids",)
            asked = [PoolingParams(), PoolingParams(task="token_embed", use_activation=False)]
            calls = [
                llm.pool(ids, one, request_id=f"{ids[0]} {one.task}")
                for one in asked
                for ids in prompts
            ]
            outputs = await asyncio.gather(*calls)
            hidden = [hidden_states(folder_of_embedder, ids) for ids in prompts]
            for output, wanted in zip(outputs, [*(states[-1] for states in hidden), *hidden]):
                assert cosine(output.outputs.data, wanted) > 0.9999
        finally:
            await llm.close()

    run(main, timeout=60)
