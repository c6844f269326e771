"""Whole generations on the device that is as late as a device may be, and raises on host reads.

The last tests break the engine on purpose: a staging slot that is reused before its last reader, a
result that is read before it has come, a kernel's value that is read on the launch path. Each is
found, so the tests above would find it too.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import numpy as np
import pytest
from support.plain import KINDS, greedy, logprobs_of, plain_engine, plain_tokens, seeded
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.batch.staged import StagedStep
from pelton.core.plan import StepPlan
from pelton.device.fake import FakeDevice, FakeEvent, HostReadError
from pelton.device.native.library import library
from pelton.device.table import STAGING_MODES
from pelton.ops.step_kernels import step_kernel
from pelton.runner.heads.results import PendingResult

PROMPTS = prompts_of([1, 4, 9, 10, 17, 26], seed=40)


def fake(**changes: Any) -> TinyEngine:
    return TinyEngine(tiny_llama(), **{"device": "fake", "num_blocks": 24, **changes})


def record_plans(engine: TinyEngine) -> list[StepPlan]:
    plans: list[StepPlan] = []
    execute = engine.worker.execute

    def recorded(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    engine.worker.execute = recorded  # type: ignore[method-assign]
    return plans


@pytest.mark.parametrize("seed", range(6))
def test_a_mixed_generation(seed):
    """Greedy, seeded, log-probabilities, prefix hits, preemption and aborts at random times."""
    rng = random.Random(seed)
    engine = fake(
        max_steps_in_flight=rng.choice([2, 3]), long_prefill_token_threshold=rng.choice([0, 3, 7])
    )
    running: dict[str, tuple[list[int], Any, int]] = {}
    aborted = set()
    for _ in range(40):
        prompt = rng.choice(PROMPTS)
        prompt = prompt + rng.choice([[], [5], prompt[:3]])
        make = KINDS[rng.choice(list(KINDS))]
        params = make(rng.choice([1, 4, 9]), logprobs=rng.choice([None, 2]))
        name = engine.add(prompt, params, seed=seed)
        running[name] = prompt, params, seed
        for _ in range(rng.randint(0, 4)):
            engine.step()
        holders = [request.request_id for request in engine.loop.scheduler._running]
        if holders and rng.random() < 0.5:
            assert engine.loop.scheduler.preempt(rng.choice(holders))
        if rng.random() < 0.3:
            victim = rng.choice(list(engine.loop.scheduler._requests) or [name])
            if engine.loop.abort(victim):
                aborted.add(victim)
    outcomes = engine.run()
    assert aborted
    assert sum(outcome.request.num_cached_tokens > 0 for outcome in outcomes.values()) > 5
    assert engine.loop.scheduler.stats.num_preemptions > 3
    for name, (prompt, params, request_seed) in running.items():
        full = plain_tokens(prompt, params, seed=request_seed)
        got = outcomes[name].token_ids
        assert got == (full[: len(got)] if name in aborted else full), name
        if params.logprobs is not None and name not in aborted:
            check_logprobs(engine, name, prompt, params, request_seed)


def check_logprobs(engine: TinyEngine, name: str, prompt: Any, params: Any, seed: int) -> None:
    plain = plain_engine(tiny_llama())
    twin = plain.add(prompt, params, seed=seed)
    plain.run()
    expected, got = logprobs_of(plain, twin, 2), logprobs_of(engine, name, 2)
    assert len(got) == len(expected)
    for one, other in zip(got, expected):
        assert one[1:3] == other[1:3]
        np.testing.assert_allclose([one[0], *one[3]], [other[0], *other[3]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight(depth):
    """At depth d, d steps are launched whose results nobody has: nothing of the newest has run."""
    engine = fake(max_steps_in_flight=depth)
    execute, device = engine.worker.execute, engine.device
    assert isinstance(device, FakeDevice)
    numbers = []

    def counted(plan: StepPlan) -> Any:
        outcome = execute(plan)
        open_steps = [one for _, one in engine.loop._in_flight if not one.is_done()]
        numbers.append(len(open_steps) + 1)
        assert not outcome.is_done()
        return outcome

    engine.worker.execute = counted  # type: ignore[method-assign]
    name = engine.add(PROMPTS[2], greedy(20))
    assert engine.run()[name].token_ids == plain_tokens(PROMPTS[2], greedy(20))
    assert max(numbers) == depth
    assert numbers[depth - 1 :] == [depth] * (20 - depth + 1)


def test_the_queue_holds_more_at_depth_two():
    most = {}
    for depth in (1, 2):
        engine = fake(max_steps_in_flight=depth)
        engine.device.synchronize()
        engine.device.max_queued = 0  # type: ignore[attr-defined]
        engine.add(PROMPTS[2], greedy(20))
        engine.run()
        most[depth] = engine.device.max_queued  # type: ignore[attr-defined]
    assert most[2] > 1.5 * most[1]


def test_decode_plans_carry_no_token_values():
    """Other tokens, same lengths: but for the new rows' prompts the plans are the same."""
    plans = []
    for seed in (1, 2):
        engine = fake(long_prefill_token_threshold=4)
        plans.append(record_plans(engine))
        for prompt in prompts_of([5, 9], seed=seed):
            engine.add(prompt, seeded(14))
        engine.run()
    tokens = [[row.token_ids.tolist() for plan in one for row in plan.new_rows] for one in plans]
    assert tokens[0] != tokens[1]
    assert len(plans[0]) == len(plans[1])
    num_decodes = 0
    for one, other in zip(*plans):
        num_decodes += not one.new_rows
        for field in dataclasses.fields(StepPlan):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if field.name == "new_rows":
                assert len(a) == len(b)
            elif isinstance(a, np.ndarray):
                assert np.array_equal(a, b)
            else:
                assert repr(a) == repr(b)
    assert num_decodes > 12


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_results_are_asked_for_by_the_consumer_alone(mode):
    """Nothing between `schedule` and `execute` runs the device's queue, nor a copy that waits for
    it."""
    engine = fake(device=f"fake/{mode}")
    device = engine.device
    assert isinstance(device, FakeDevice)
    execute = engine.worker.execute

    num_run: list[int] = []

    def watched(plan: StepPlan) -> Any:
        before = device.num_done
        outcome = execute(plan)
        num_run.append(device.num_done - before)
        return outcome

    engine.worker.execute = watched  # type: ignore[method-assign]
    names = [engine.add(prompt, seeded(14)) for prompt in PROMPTS[:4]]
    outcomes = engine.run()
    assert all(outcomes[name].error is None for name in names)
    assert len(num_run) >= 14
    assert not any(num_run)


@pytest.mark.parametrize("cold_bytes", [None, 1], ids=["device", "cold"])
@pytest.mark.parametrize("mode", STAGING_MODES)
def test_the_ways_of_staging_give_the_same_tokens(mode, cold_bytes, monkeypatch):
    """Case 1. The token table lies in host memory where the mode allows it and it counts as
    large."""
    monkeypatch.setattr(FakeDevice.__init__, "__defaults__", ("auto", cold_bytes))
    engine = fake(device=f"fake/{mode}", max_steps_in_flight=3)
    host_memory = engine.device.host_memory  # type: ignore[attr-defined]
    assert host_memory.mode == mode
    assert bool(host_memory.host_bytes) == (mode == "aliased" and cold_bytes == 1)
    expected = {}
    for index, prompt in enumerate(PROMPTS):
        params = (greedy if index % 2 else seeded)(6 + index)
        expected[engine.add(prompt, params)] = plain_tokens(prompt, params)
        engine.step()
    outcomes = engine.run()
    assert {name: outcomes[name].token_ids for name in expected} == expected


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("auto", "aliased (kernels read what the host wrote, twice, and the host what they wrote)"),
        ("pageable", "pageable (asked for)"),
    ],
)
def test_a_start_tells_once_which_way_was_chosen_why_and_where_the_tokens_lie(
    mode, told, caplog, monkeypatch
):
    """specs/staging_and_pooling.md 1.9 T6."""
    monkeypatch.setattr(FakeDevice.__init__, "__defaults__", ("auto", 1))
    with caplog.at_level("INFO", logger="pelton"):
        engine = fake(device=f"fake/{mode}")
    num_rows, length = engine.worker.runner._rows._tokens.shape
    num_bytes = 4 * num_rows * length
    lines = [text for text in caplog.messages if text.startswith("Staging memory")]
    where = "device" if mode == "pageable" else "host"
    assert lines == [
        f"Staging memory of fake: {told}; {num_bytes} bytes of large tables lie in {where} memory."
    ]


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_a_decode_step_publishes_nothing_but_new_blocks(mode):
    """specs/staging_and_pooling.md 1.9 T3: a step without arrivals, departures and new blocks has
    no publish and no copy; one with new blocks has one staged write for each."""
    engine = fake(device=f"fake/{mode}")
    staging = engine.worker._assembled.runner._staging
    device = engine.device
    assert isinstance(device, FakeDevice)
    execute = engine.worker.execute
    counts: list[tuple[int, int, int]] = []  # appends, publishes, copies
    last: list[Any] = [None]

    def counted(plan: StepPlan) -> Any:
        publishes, copies = staging.stats.num_publishes, device.num_copies_to_device
        outcome = execute(plan)
        # A row leaves when all its tokens are in flight, before its plan says that it has finished.
        rows = plan.refs, plan.num_scheduled_tokens.tolist()
        if rows == last[0] and not plan.new_rows:
            counts.append(
                (
                    len(plan.block_appends),
                    staging.stats.num_publishes - publishes,
                    device.num_copies_to_device - copies,
                )
            )
        last[0] = rows
        return outcome

    engine.worker.execute = counted  # type: ignore[method-assign]
    for prompt in PROMPTS[1:4]:
        engine.add(prompt, greedy(24))
    engine.run()
    quiet = [count for count in counts if not count[0]]
    assert len(quiet) > 5
    assert set(quiet) == {(0, 0, 0)}
    appends = [count for count in counts if count[0]]
    assert appends
    assert all(publishes == 1 for _, publishes, _ in appends)
    assert all(copies == (mode != "aliased") for _, _, copies in appends)


# Broken on purpose.


def is_found(**changes: Any) -> bool:
    """Whether a generation in changing company shows a fault: wrong tokens, an error, a raise."""
    engine = fake(num_blocks=60, **changes)
    expected = {}
    try:
        for index, prompt in enumerate(PROMPTS):
            params = (greedy if index % 2 else seeded)(6 + index)
            expected[engine.add(prompt, params)] = plain_tokens(prompt, params)
            engine.step()
        outcomes = engine.run()
    except Exception:
        return True
    return any(outcomes[name].token_ids != tokens for name, tokens in expected.items())


def test_the_whole_engine_passes_this_check():
    assert not is_found()
    assert not is_found(max_steps_in_flight=3)


def test_a_staging_slot_reused_early_is_found(monkeypatch, request):
    """Case 1: without the fence, and a ring so short that only the fence protects it. By the
    references: they look at what they index with, where C reads any memory that it is told to."""
    for module in [m for n, m in sys.modules.items() if n.startswith("pelton.")]:
        if getattr(module, "library", None) is library:
            monkeypatch.setattr(module, "library", lambda: None)
    step_kernel.cache_clear()  # chosen once in a process
    request.addfinalizer(step_kernel.cache_clear)
    engine_init = TinyEngine.__init__

    def short_ring(self: TinyEngine, *args: Any, **kwargs: Any) -> None:
        engine_init(self, *args, **kwargs)
        staging = self.worker._assembled.runner._staging
        self.device.synchronize()
        del staging._ring[1:]
        staging._next = 0

    monkeypatch.setattr(TinyEngine, "__init__", short_ring)
    assert not is_found()  # slower, and right: the fence makes it wait
    lease = StagedStep.lease

    def without_fence(self: StagedStep) -> None:
        self._fence = None
        lease(self)

    monkeypatch.setattr(StagedStep, "lease", without_fence)
    assert is_found()


def test_a_result_read_early_is_found(monkeypatch):
    """Two counters drift apart, or memory is read that nobody has written."""
    collect = PendingResult.collect

    def early(self: PendingResult) -> Any:
        self._event = FakeEvent(FakeDevice(), 0)
        return collect(self)

    monkeypatch.setattr(PendingResult, "collect", early)
    assert is_found()


def test_a_host_read_on_the_launch_path_is_found(monkeypatch):
    engine = fake()
    builder = engine.worker._assembled.runner._builder
    launch = builder.launch

    def reads(batch: Any) -> None:
        launch(batch)
        int(batch.inputs.seq_lens.max())

    monkeypatch.setattr(builder, "launch", reads)
    name = engine.add(PROMPTS[2], greedy())
    assert isinstance(engine.run()[name].error, HostReadError)
