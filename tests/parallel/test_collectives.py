"""Ranks that are told the same make the same calls, whatever is scheduled."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.plain import KINDS, plain_tokens
from support.ranks import Group, ThreadRank
from support.tiny import TinyEngine, checkpoint_of, make_config, make_device, prompts_of, tiny_llama

from pelton.config.engine import EngineConfig
from pelton.core.plan import StepPlan, StepResult
from pelton.engine.loop import EngineLoop
from pelton.parallel import collectives
from pelton.worker.worker import Worker

SIZE = 2


class ThreadWorkers:
    """In the place of a group of processes: a thread for each rank."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runs_inline = False
        self.ranks = [ThreadRank(rank, Group(SIZE)) for rank in range(SIZE)]
        for rank in self.ranks:
            rank.group = self.ranks[0].group
        self._plans: list[queue.Queue[StepPlan | None]] = [queue.Queue() for _ in self.ranks]
        self._results: list[queue.Queue[Any]] = [queue.Queue() for _ in self.ranks]
        self.threads = [threading.Thread(target=self._run, args=(rank,)) for rank in self.ranks]
        for thread in self.threads:
            thread.start()
        ready = [self._next(rank) for rank in range(SIZE)]
        self.groups, self.move_costs = ready[0].groups, ready[0].move_costs

    def _run(self, rank: ThreadRank) -> None:
        torch.set_num_threads(1)
        results = self._results[rank.rank]
        try:
            worker = Worker(
                self.config,
                checkpoint_of(tiny_llama()),
                device=make_device("cpu"),
                communicator=rank,
            )
            results.put(worker)
            while (plan := self._plans[rank.rank].get()) is not None:
                results.put(worker.execute(plan).collect())
        except BaseException as error:
            rank.group.barrier.abort()
            results.put(error)
            while self._plans[rank.rank].get() is not None:
                results.put(error)

    def _next(self, rank: int) -> Any:
        found = self._results[rank].get(timeout=60)
        if isinstance(found, BaseException):
            raise found
        return found

    def execute(self, plan: StepPlan) -> ThreadWorkers:
        for plans in self._plans:
            plans.put(plan)
        return self

    def is_done(self) -> bool:
        return True

    def collect(self) -> StepResult:
        first, *others = (self._next(rank) for rank in range(SIZE))
        for other in others:  # so nobody need tell the others what was drawn
            assert np.array_equal(first.token_ids, other.token_ids)
        return first

    def record_next(self) -> bool:
        return False

    def close(self) -> None:
        for plans in self._plans:
            plans.put(None)
        for thread in self.threads:
            thread.join(60)


class ThreadEngine(TinyEngine):
    def __init__(self, workers: ThreadWorkers) -> None:
        self.config = workers.config
        self.loop = EngineLoop(self.config, workers)  # type: ignore[arg-type]
        self.outcomes = {}
        self._next = 0


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules(seed):
    """Prompts, parameters, preemptions and aborts at random."""
    rng = np.random.default_rng(seed)
    config = make_config(
        tiny_llama(),
        num_blocks=20,
        max_num_batched_tokens=int(rng.integers(5, 40)),
        long_prefill_token_threshold=int(rng.integers(0, 9)),
    )
    workers = ThreadWorkers(config)
    try:
        engine, expected = ThreadEngine(workers), {}
        for index, prompt in enumerate(prompts_of(rng.integers(1, 30, 8).tolist(), seed=seed)):
            make = KINDS[("greedy", "seeded")[int(rng.integers(2))]]
            name = engine.add(prompt, make(), seed=index)
            expected[name] = plain_tokens(prompt, make(), seed=index)
            for _ in range(int(rng.integers(0, 6))):
                engine.step()
            if rng.random() < 0.3:
                engine.loop.scheduler.preempt(f"r{rng.integers(index + 1)}")
        aborted = engine.add(prompt)
        engine.step()
        engine.loop.abort(aborted)
        outcomes = engine.run()
        for name, tokens in expected.items():
            assert outcomes[name].token_ids == tokens
        calls = [rank.calls for rank in workers.ranks]
        assert len(calls[0]) > 100
        assert calls[0] == calls[1]
    finally:
        workers.close()


def test_ranks_that_are_told_different_steps_are_found_out():
    """The check can fail: the second rank's step has a token less."""
    workers = ThreadWorkers(make_config(tiny_llama()))
    execute = ThreadWorkers.execute

    def differently(plan: StepPlan) -> ThreadWorkers:
        for rank, plans in enumerate(workers._plans):
            count = plan.num_scheduled_tokens - rank * (plan.num_scheduled_tokens > 1)
            plans.put(StepPlan(**{**_fields(plan), "num_scheduled_tokens": count}))
        return workers

    workers.execute = differently  # type: ignore[method-assign]
    try:
        engine = ThreadEngine(workers)
        engine.add(prompts_of([6])[0])
        assert engine.run()["r0"].finish_reason == "error"
        calls = [rank.calls for rank in workers.ranks]
        assert calls[0] != calls[1]
    finally:
        workers.execute = execute.__get__(workers)  # type: ignore[method-assign]
        workers.close()


def _fields(plan: StepPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in StepPlan.__slots__}


def test_the_rank_that_was_told_another_thing_is_named(monkeypatch):
    monkeypatch.setattr(collectives.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 4)
    for numbers, odd in (([5, 5, 5, 5], None), ([5, 5, 7, 5], 2), ([1, 5, 5, 5], 0)):

        def gather(out: torch.Tensor, mine: torch.Tensor, numbers: list[int] = numbers) -> None:
            out.copy_(torch.tensor(numbers))

        monkeypatch.setattr(collectives.dist, "all_gather_into_tensor", gather)
        assert collectives.odd_one_out(5) == odd
