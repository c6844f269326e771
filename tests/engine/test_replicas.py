"""Several engines as one: over scripted ones, and over real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from engine.test_async_llm import collect, params, run
from engine.test_llm import TEXTS, make_llm
from engine.test_process import args, is_gone
from support.encoders import tiny_encoder
from support.plain import greedy, seeded
from support.scripted_engine import engines_of, scripted_llm, scripted_stats, text_script

from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.scheduler import SchedulerStats
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.client import EngineProcess
from pelton.engine.replicas import Replicas, added
from pelton.errors import ConfigError, EngineBusy, EngineDead, UnsupportedError
from pelton.messages.to_engine import Abort, AddRequest, ResetPrefixCache

GONE_SECONDS = 10.0


def num_requests(llm: AsyncLLM) -> list[int]:
    return [
        sum(isinstance(message, AddRequest) for message in engine.sent)
        for engine in engines_of(llm)
    ]


def check_over(llm: AsyncLLM) -> None:
    """Nothing is open anywhere, nor thought to be."""
    assert not llm._streams
    assert not llm._answers
    assert [engine.num_open for engine in engines_of(llm)] == [0] * llm.facts.num_replicas
    coordinator = cast(Replicas, llm._link)._coordinator
    assert not coordinator._places
    assert [replica.num_open for replica in coordinator._replicas] == [0] * llm.facts.num_replicas


def test_requests_spread_and_their_answers_stay_together():
    async def main() -> None:
        llm = scripted_llm(text_script("A turbine."), num_replicas=3)
        found = await asyncio.gather(
            *(collect(llm, f"r{i}", params(n=1 + i % 3), prompt=f"{i} is it") for i in range(12))
        )
        for outputs, _ in found:
            assert [output.text for output in outputs] == ["A turbine."] * len(outputs)
        assert sum(num_requests(llm)) == 12
        assert min(num_requests(llm)) >= 3
        check_over(llm)
        await llm.close()
        assert all(engine.is_closed for engine in engines_of(llm))

    run(main)


def test_an_abort_goes_to_the_engine_that_has_the_request():
    async def main() -> None:
        llm = scripted_llm(num_replicas=2, delay=0.005)
        tasks = [
            asyncio.create_task(collect(llm, f"r{i}", params(None, n=2), prompt=f"{i} is it"))
            for i in range(4)
        ]
        await asyncio.sleep(0.05)
        assert [engine.num_open for engine in engines_of(llm)] == [4, 4]
        await llm.abort("r0")
        outputs, _ = await tasks[0]
        assert [output.finish_reason for output in outputs] == ["abort"] * 2
        assert sorted(engine.num_open for engine in engines_of(llm)) == [2, 4]
        for engine in engines_of(llm):
            handles = {m.handle for m in engine.sent if isinstance(m, AddRequest)}
            assert {m.first for m in engine.sent if isinstance(m, Abort)} <= handles
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        check_over(llm)
        # A place that is free again is used.
        (output,), _ = await collect(llm, "after", params(3), prompt="It is")
        assert len(output.token_ids) == 3

    run(main)


def test_room_is_that_of_all_engines():
    """SmolLM2's configuration has 32 rows."""

    async def main() -> None:
        llm = scripted_llm(num_replicas=2, delay=0.005, max_num_queued_reqs=1)
        assert llm.facts.max_num_seqs == 64
        assert llm.max_answers == 65
        open_ones = [llm.generate(f"{i}", params(None), request_id=f"r{i}") for i in range(65)]
        first = await asyncio.gather(*(anext(one) for one in open_ones))
        assert len(first) == 65
        stats = llm.stats()
        assert stats.scheduler.num_running == 64
        assert (stats.scheduler.num_waiting, stats.num_queued) == (1, 1)
        assert stats.scheduler.kv_usage == 1.0
        with pytest.raises(EngineBusy):
            await anext(llm.generate("x", params(None), request_id="one too many"))
        for one in open_ones:
            await one.aclose()

    run(main)


def test_a_reset_is_all_engines_reset():
    async def main() -> None:
        llm = scripted_llm(num_replicas=2, delay=0.005)
        assert (
            await asyncio.gather(llm.reset_prefix_cache(), llm.reset_prefix_cache()) == [True] * 2
        )
        task = asyncio.create_task(collect(llm, "r", params(None)))
        await asyncio.sleep(0.02)
        assert await llm.reset_prefix_cache() is False  # one of them is busy
        await llm.abort("r")
        await task
        assert await llm.reset_prefix_cache()
        for engine in engines_of(llm):
            assert sum(isinstance(message, ResetPrefixCache) for message in engine.sent) == 4

    run(main)


def test_one_death_is_all_deaths_by_name():
    async def main() -> None:
        llm = scripted_llm(num_replicas=2, delay=0.005)
        tasks = [
            asyncio.create_task(collect(llm, f"r{i}", params(None), prompt=f"{i}"))
            for i in range(4)
        ]
        await asyncio.sleep(0.02)
        one, other = engines_of(llm)
        other.die("The engine's process was killed.")
        assert not llm.is_alive
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDead)
            assert str(result) == "Replica 1: The engine's process was killed."
        with pytest.raises(EngineDead, match="Replica 1"):
            await collect(llm, "late")
        await asyncio.sleep(0.01)
        assert one.is_closed
        assert "Replica 1" in str(await llm.died())
        await llm.close()

    run(main)


def test_counts_are_added():
    one = replace(scripted_stats(), num_running=3, kv_usage=0.5, step_sizes=(1, 2))
    two = replace(scripted_stats(), num_running=4, kv_usage=0.1, num_group_matches=(7,))
    both = added([one, two], 2)
    assert isinstance(both, SchedulerStats)
    assert (both.num_running, both.kv_usage) == (7, pytest.approx(0.3))
    assert (both.step_sizes, both.num_group_matches) == ((1, 2), (7,))
    assert added([one], 2).kv_usage == 0.25


# Real processes.


def processes_of(llm: AsyncLLM) -> list[EngineProcess]:
    link = llm._link
    assert isinstance(link, Replicas)
    found = [one for one in link._links if isinstance(one, EngineProcess)]
    assert len(found) == len(link._links)
    return found


PARAMS = [
    greedy(),
    seeded(seed=4, n=3, logprobs=2),
    greedy(stop=["e"]),
    seeded(seed=9),
    greedy(3, prompt_logprobs=1),
    seeded(seed=5, n=2, stop=["a"]),
]


def test_a_life_of_two_replicas():
    """One engine's answers from two, with requests aborted on the way; prompts that begin alike
    meet where they are cached; an end that leaves nothing."""
    texts = [TEXTS[i % len(TEXTS)] for i in range(len(PARAMS))]
    offline = make_llm(batch_invariant=True)
    wanted = [offline.generate(t, p, use_tqdm=False)[0].outputs for t, p in zip(texts, PARAMS)]
    offline.close()
    phases: list[str] = []

    async def give_up(llm: AsyncLLM, name: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await collect(llm, name, greedy(None), prompt=TEXTS[0])

    async def ask(llm: AsyncLLM, index: int) -> None:
        (outputs, _) = await collect(llm, f"r{index}", PARAMS[index], prompt=texts[index])
        for output, other in zip(outputs, wanted[index], strict=True):
            assert (output.text, output.token_ids) == (other.text, other.token_ids)
            assert output.logprobs == other.logprobs
            assert output.finish_reason == other.finish_reason

    async def main() -> None:
        llm = await AsyncLLM.start(
            args(data_parallel_size=2), on_phase=lambda name, seconds: phases.append(name)
        )
        pids = [process.pid for process in processes_of(llm)]
        assert list(llm.facts.start_times) == ["check", *phases]
        assert phases[0] == "process"
        assert len(set(phases)) == len(phases)
        assert llm.facts.num_replicas == 2
        assert llm.facts.max_num_seqs == 2 * llm.config.scheduler.max_num_seqs
        places: list[int] = []
        link = llm._link
        assert isinstance(link, Replicas)
        choose = link._coordinator.choose

        def told(message: AddRequest) -> int:
            places.append(choose(message))
            return places[-1]

        link._coordinator.choose = told  # type: ignore[method-assign]
        for _ in range(3):
            given_up = [give_up(llm, f"gone{i}") for i in range(3)]
            await asyncio.gather(*(ask(llm, i) for i in range(len(PARAMS))), *given_up)
        assert set(places) == {0, 1}
        while llm.stats().scheduler.num_running:
            await asyncio.sleep(0.01)
        assert await llm.reset_prefix_cache()

        # Two prompts of 48 tokens go to two engines, and longer ones that begin alike after them.
        del places[:]
        block = llm.config.cache.block_size
        heads = [[10 + i] * 3 * block for i in range(2)]
        for turn in range(3):
            for i, head in enumerate(heads):
                tail = [20 + turn] * turn
                _, deltas = await collect(llm, f"h{i}", greedy(2), prompt=[*head, 9, *tail])
                assert deltas[0].num_cached_tokens == (3 * block if turn else 0)
        assert places in ([0, 1] * 3, [1, 0] * 3)
        stats = llm.stats().scheduler
        assert stats.num_cache_hits >= 4 * 3 * block
        await llm.close()
        assert all(map(is_gone, pids))

    run(main, 180)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_replica_is_killed(victim):
    """kill -9: whoever waits hears its name, and nothing is left of the other one."""

    async def main() -> None:
        llm = await AsyncLLM.start(args(data_parallel_size=2))
        pids = [process.pid for process in processes_of(llm)]
        folders = [process._folder for process in processes_of(llm)]
        tasks = [
            asyncio.create_task(collect(llm, f"r{i}", greedy(None), prompt=TEXTS[i % 3]))
            for i in range(4)
        ]
        await asyncio.sleep(0)
        os.kill(pids[victim], signal.SIGKILL)
        deadline = time.monotonic() + GONE_SECONDS
        match = rf"Replica {victim} \(process {pids[victim]}\): .* killed by signal 9"
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, tuple):  # it may have come to its end before
                assert isinstance(result, EngineDead)
        assert not llm.is_alive
        with pytest.raises(EngineDead, match=match):
            await collect(llm, "late", greedy())
        while not all(map(is_gone, pids)) or any(map(Path.exists, folders)):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await llm.close()

    run(main, 120)


@pytest.mark.long
def test_replicas_pool_and_have_workers():
    """An encoder, which has no KV cache to tell of; and engines that are two processes each."""

    async def main() -> None:
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_threads": 1}
        found = []
        for num_replicas in (1, 2):
            llm = await AsyncLLM.start(
                EngineArgs(
                    model=str(tiny_encoder("Bert")), data_parallel_size=num_replicas, **settings
                )
            )
            asked = [llm.pool([5, 6, 7 + i], PoolingParams(), request_id=f"r{i}") for i in range(4)]
            found.append([one.outputs.data.tolist() for one in await asyncio.gather(*asked)])
            await llm.close()
        assert found[0] == found[1]

        llm = await AsyncLLM.start(args(data_parallel_size=2, tensor_parallel_size=2))
        pids = [process.pid for process in processes_of(llm)]
        workers = [
            int(one)
            for pid in pids
            for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
        assert len(workers) == 4
        await asyncio.gather(*(collect(llm, f"r{i}", greedy(), prompt=TEXTS[i]) for i in range(4)))
        os.kill(workers[3], signal.SIGKILL)
        assert "Replica 1" in str(error := await llm.died())
        assert "rank 1" in str(error)
        deadline = time.monotonic() + GONE_SECONDS
        while not all(map(is_gone, (*pids, *workers))):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await llm.close()

    run(main, 240)


def test_what_a_replica_finds_out_is_the_users_fault_all_the_same():
    async def main() -> None:
        with pytest.raises(ConfigError, match="raise num_gpu_blocks_override to 25") as caught:
            await AsyncLLM.start(args(num_gpu_blocks_override=20, data_parallel_size=2))
        assert type(caught.value) is ConfigError

    run(main, 60)


@pytest.mark.parametrize("phase", ["process", pytest.param("imports", marks=pytest.mark.long)])
def test_a_replica_is_killed_while_it_starts(phase, monkeypatch):
    started: list[EngineProcess] = []
    spawn = EngineProcess.spawn

    async def told(*given: Any, **options: Any) -> EngineProcess:
        process = await spawn(*given, **options)
        started.append(process)
        return process

    monkeypatch.setattr(EngineProcess, "spawn", told)

    def on_phase(name: str, seconds: float) -> None:
        if name == phase:
            os.kill(started[1].pid, signal.SIGKILL)

    async def main() -> None:
        with pytest.raises(EngineDead, match=r"Replica 1 \(process \d+\): .* signal 9"):
            await AsyncLLM.start(args(data_parallel_size=2), on_phase=on_phase)
        assert all(is_gone(process.pid) for process in started)

    run(main, 60)


def test_offline_work_is_refused():
    with pytest.raises(UnsupportedError, match="data_parallel_size=2 is for a server"):
        make_llm(data_parallel_size=2)


def test_sampling_params_are_left_alone():
    """All answers of a request go to one engine: n is passed on as it is."""

    async def main() -> None:
        llm = scripted_llm(num_replicas=2)
        await collect(llm, "r", SamplingParams(max_tokens=2, n=5))
        (message,) = [m for e in engines_of(llm) for m in e.sent if isinstance(m, AddRequest)]
        assert message.params["n"] == 5

    run(main)
