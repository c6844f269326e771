"""Workers in processes of their own: the answers of one, and what happens when one of them goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine.test_process import is_gone
from support.embeds import check_forms
from support.families import tiny_model
from support.plain import KINDS, greedy, plain_tokens
from support.pooled import cosine, hidden_states, normalised
from support.sabotage import TARGET
from support.tiny import TinyEngine, checkpoint_of, make_config, prompts_of, tiny_llama

from pelton.config.parallel import ParallelConfig
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.engine.loop import EngineLoop
from pelton.errors import ConfigError, DeviceLost
from pelton.sampling.table import PROCESSORS
from pelton.worker import group as group_module
from pelton.worker.group import WorkerGroup

LAYOUTS = {
    "TP2": ParallelConfig(tensor=2),
    "TP4": ParallelConfig(tensor=4),
    "PP2": ParallelConfig(pipeline=2),
    "TP2 PP2": ParallelConfig(tensor=2, pipeline=2),
    "PP4": ParallelConfig(pipeline=4),
}
GONE_SECONDS = 10.0


def folder() -> Path:
    """Four layers: one for each of four stages."""
    return tiny_llama(num_hidden_layers=4)


def tokens_of(prompt: list[int], params: SamplingParams, seed: int = 7) -> list[int]:
    return plain_tokens(prompt, params, seed=seed, folder=folder())


def start(parallel: ParallelConfig, checkpoint: Path | None = None, **changes: Any) -> WorkerGroup:
    stages = {"num_stages": parallel.pipeline, "max_steps_in_flight": max(parallel.pipeline, 2)}
    checkpoint = checkpoint or folder()
    config = make_config(checkpoint, parallel=parallel, **{**stages, **changes})
    tables = {"pelton.sampling.table:PROCESSORS": {"sabotage": TARGET}}
    return WorkerGroup(config, checkpoint_of(checkpoint), tables)


class GroupEngine(TinyEngine):
    """A new scheduler over workers that stand already."""

    def __init__(self, workers: WorkerGroup) -> None:
        self.config = workers.config
        self.loop = EngineLoop(self.config, workers)
        self.outcomes = {}
        self._next = 0


@pytest.fixture(scope="module", params=LAYOUTS)
def workers(request: Any) -> Iterator[WorkerGroup]:
    """One pool for all tests of a layout: small, so that some of them preempt. The ranks compare
    what they are told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PELTON_CHECK_PLANS", "1")
        workers = start(
            LAYOUTS[request.param],
            max_num_seqs=8,
            num_blocks=40,
            long_prefill_token_threshold=7,
            enable_prompt_embeds=True,
        )
    yield workers
    workers.close()


def test_the_answers_of_one_process(workers):
    """Chunked prefills, a pool that is too small, requests preempted and aborted on the way."""
    engine, expected = GroupEngine(workers), {}
    for index, prompt in enumerate(prompts_of([1, 6, 11, 24, 30], seed=17)):
        for make in KINDS.values():
            name = engine.add(prompt, make(logprobs=1), seed=index)
            expected[name] = tokens_of(prompt, make(), seed=index)
    aborted = [engine.add(prompt, greedy()) for prompt in prompts_of([9, 20], seed=3)]
    for count in range(1000):
        if not engine.loop.has_work():
            break
        engine.step()
        if count % 11 == 5:
            engine.loop.scheduler.preempt(f"r{count % 10}")
        if count == 20:
            for name in aborted:
                engine.loop.abort(name)
    outcomes = engine.run()
    assert engine.loop.scheduler.stats.num_preemptions > 1
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


def test_prompts_of_embeddings(workers):
    check_forms(GroupEngine(workers), folder(), prompts_of([1, 6, 11, 24], seed=19), KINDS)


@pytest.mark.parametrize("layout", ["TP2", "PP4"])
def test_pooling(layout):
    """Prompts in chunks of 3, which only stages whose rows have advanced read in order."""
    checkpoint = tiny_model("Qwen3", num_hidden_layers=4)
    workers = start(LAYOUTS[layout], checkpoint, runner="pooling", long_prefill_token_threshold=3)
    prompts = prompts_of([1, 4, 10, 30], seed=2)
    for params in (
        PoolingParams(),
        PoolingParams(method="mean"),
        PoolingParams(task="token_embed"),
    ):
        for prompt, found in zip(prompts, GroupEngine(workers).pool(prompts, params), strict=True):
            states = hidden_states(checkpoint, prompt)
            if params.task is None:
                states = states[-1] if params.method is None else states.mean(axis=0)
            assert cosine(found, normalised(states)) > 0.9999
    workers.close()


def test_prefix_hits(workers):
    engine = GroupEngine(workers)
    (prompt,) = prompts_of([30], seed=5)
    wanted = tokens_of(prompt, greedy())
    for _ in range(2):
        name = engine.add(prompt, greedy())
        assert engine.run()[name].token_ids == wanted
    request = engine.outcomes[name].request
    assert request is not None
    assert request.num_cached_tokens == 28


def test_prompt_logprobs(workers):
    """From gathered logits; the same as one process's to what sums in another order differ by."""
    (prompt,) = prompts_of([20], seed=6)
    found = []
    for engine in (GroupEngine(workers), TinyEngine(folder())):
        engine.add(prompt, greedy(3, prompt_logprobs=2))
        while engine.loop.has_work():
            for update, _ in engine.loop.step():
                if update.prompt_logprobs is not None:
                    found.append(update.prompt_logprobs)
    assert found[0].top_ids.tolist() == found[1].top_ids.tolist()
    assert found[0].token_logprobs == pytest.approx(found[1].token_logprobs, abs=1e-4)


def test_a_request_that_all_ranks_refuse_fails_alone(workers):
    engine = GroupEngine(workers)
    good, bad = prompts_of([6, 7])
    names = [engine.add(good, greedy()), engine.add(bad, greedy(logprobs=10**6))]
    outcomes = engine.run()
    assert outcomes[names[0]].token_ids == tokens_of(good, greedy())
    assert outcomes[names[1]].finish_reason == "error"


def test_a_setting_that_no_rank_can_have_is_told_at_start():
    with pytest.raises(ConfigError, match="tensor_parallel_size=3"):
        start(ParallelConfig(tensor=3))


def pids(workers: WorkerGroup) -> list[int]:
    return [process.pid for process in workers._processes]


def assert_gone(workers: WorkerGroup, place: Path) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while not all(is_gone(pid) for pid in pids(workers)) or place.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["killed", "stopped", "failed", "late"])
def test_a_rank_that_goes_ends_the_group_by_name(how, monkeypatch):
    """In the midst of a step: the error says which one, and nothing is left."""
    monkeypatch.setitem(PROCESSORS, "sabotage", TARGET)
    monkeypatch.setattr(group_module, "_SILENCE_SECONDS", 2.0)
    timeout = 3.0 if how == "late" else 100.0
    workers = start(ParallelConfig(tensor=2, step_timeout=timeout))
    place, engine = Path(workers._folder), GroupEngine(workers)
    (prompt,) = prompts_of([6])
    heard: list[Exception] = []
    workers.listen(heard.append)
    engine.add(prompt, greedy(100))
    for _ in range(3):
        engine.step()
    pid = pids(workers)[1]
    match = rf"rank 1 \(process {pid}\)"
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
        match += " was killed by SIGKILL"
    elif how == "stopped":
        os.kill(pid, signal.SIGSTOP)
        match += " has not moved"
    else:
        what = "1:exception" if how == "failed" else "1:sleep:100"
        engine.add(prompt, greedy(logits_processors={"sabotage": {"how": what}}))
        match = match + " failed: ZeroDivisionError: on purpose"
        if how == "late":
            match = "has not ended after 3 s. rank 0: step .*, all_.*; rank 1: step .*"
    begun = time.monotonic()
    with pytest.raises(DeviceLost, match=match):
        engine.run(10**6)
    assert time.monotonic() - begun < GONE_SECONDS
    assert_gone(workers, place)
    assert [type(error) for error in heard] == [DeviceLost]
    with pytest.raises(DeviceLost, match=match):
        workers.execute(engine.loop.scheduler.schedule())  # type: ignore[arg-type]
    workers.close()


PARENT = """
import sys, time
from worker.test_group import pids, start
from pelton.config.parallel import ParallelConfig
from pelton.config.params import SamplingParams
print(*pids(start(ParallelConfig(tensor=2))), flush=True)
time.sleep(100)
"""


def test_a_parent_that_goes_takes_its_workers_along():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + GONE_SECONDS
    while not all(is_gone(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
