"""Steps in flight, faults, and public bug reports as small inputs, on tiny pools."""

from __future__ import annotations

import gc
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from support.logits import hook_logits
from support.plain import KINDS, greedy, plain_tokens, seeded
from support.tiny import TinyEngine, prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.core.plan import StepResult
from pelton.device.fake import FakeDevice
from pelton.errors import DeviceLost, RequestError, RequestFailed

SMALL: dict[str, Any] = {"num_blocks": 16, "max_steps_in_flight": 2}
"""Block size 4, 16 blocks, 4 rows, depth 2: preemption, eviction and row reuse within seconds."""


def small(device: str = "queued", **changes: Any) -> TinyEngine:
    return TinyEngine(tiny_llama(), device=device, **{**SMALL, **changes})


def hook_head(engine: TinyEngine, change: Any) -> None:
    """change(logits [N, V], number of the call) after each head product."""
    calls = iter(range(10**9))
    hook_logits(engine.worker.model, lambda logits: change(logits, next(calls)))


def hook_results(engine: TinyEngine, change: Any) -> None:
    """change(result, plan) between the device and the scheduler."""
    update = engine.loop.scheduler.update

    def hooked(plan: Any, result: StepResult) -> Any:
        change(result, plan)
        return update(plan, result)

    engine.loop.scheduler.update = hooked  # type: ignore[method-assign]


def is_clean(engine: TinyEngine) -> bool:
    """Nobody holds anything."""
    scheduler = engine.loop.scheduler
    scheduler.check_integrity()
    return (
        not scheduler._requests
        and not scheduler._by_ref
        and not scheduler._waiting
        and not scheduler._running
        and not scheduler._in_flight
        and not engine.loop._in_flight
        and len(scheduler._free_slots) == engine.config.scheduler.max_num_seqs
        and scheduler._kv.num_used == 0
    )


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_changing_company_at_every_step(device):
    """Case 1: depth 2, late copies, another composition in each step; plus case 2's preemptions."""
    rng = random.Random(4)
    engine = small(device, num_blocks=40)
    expected, waiting = {}, prompts_of([1, 3, 6, 9, 10, 13, 17, 22], seed=6) * 2
    for count in range(3000):
        if waiting and count % 2 == 0:
            index, prompt = len(waiting), waiting.pop()
            make = KINDS[rng.choice(list(KINDS))]
            params = make(3 + index, logprobs=rng.choice([None, 0, 3]))
            expected[engine.add(prompt, params, seed=index)] = plain_tokens(
                prompt, params, seed=index
            )
        elif not engine.loop.has_work():
            break
        if count % 5 == 0:
            engine.loop.scheduler.preempt(rng.choice(list(expected)))
        engine.step()
        engine.loop.scheduler.check_integrity()
    outcomes = engine.run()
    assert len(expected) == 16
    for name, tokens in expected.items():
        assert outcomes[name].token_ids == tokens, name


def sweep_preemptions(device: str, ks: range) -> None:
    prompts = prompts_of([10] * 4, seed=21)
    for k in ks:
        engine = small(device, long_prefill_token_threshold=3)
        names = [engine.add(prompt, greedy(30)) for prompt in prompts]
        for _ in range(k):
            engine.step()
        engine.loop.scheduler.preempt(names[k % 4])
        outcomes = engine.run()
        for name, prompt in zip(names, prompts):
            assert outcomes[name].token_ids == plain_tokens(prompt, greedy(30)), (k, name)


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_forced_preemption_in_a_tight_pool(device):
    """Case 2: 4 prompts of 10, 30 tokens each, chunk 3, a forced preemption at step k."""
    sweep_preemptions(device, range(1, 60, 8))


@pytest.mark.long
@pytest.mark.parametrize("device", ["queued", "fake"])
def test_forced_preemption_at_every_step_in_a_tight_pool(device):
    """Case 2, every k."""
    sweep_preemptions(device, range(1, 100))


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_requests_that_can_not_fit(device):
    """Case 3: refused at once with both numbers, and the queue goes on."""
    engine = small(device, max_model_len=200)
    for length in (61, 64, 65, 199, 200):
        with pytest.raises(RequestError, match=rf"(?s){length}.*(15|199)"):
            engine.add(prompts_of([length])[0])
    # The first output needs no KV, so 60 tokens fit the 15 usable blocks of 4.
    fitting = [engine.add(prompts_of([length])[0], greedy(1)) for length in (59, 60)]
    last = engine.add(prompts_of([5])[0], greedy(3))
    outcomes = engine.run()
    assert [len(outcomes[name].token_ids) for name in fitting] == [1, 1]
    assert outcomes[last].token_ids == plain_tokens(prompts_of([5])[0], greedy(3))


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_a_request_that_outgrows_the_pool_alone(device):
    """Case 3: it ends with "length", it does not loop."""
    (prompt,) = prompts_of([30], seed=5)
    engine = small(device, max_model_len=200)
    name = engine.add(prompt, greedy(150))
    outcome = engine.run()[name]
    assert outcome.finish_reason == "length"
    assert len(outcome.token_ids) == 31  # 60 tokens in the pool, and one that needs no KV
    assert outcome.token_ids == plain_tokens(prompt, greedy(31))


def test_priority_preempts_only_who_was_not_served():
    """Case 4: A (priority 5) has a long prefill; the growth of B and C evicts A, and both get their
    token in that step; A is served in the end."""
    a, b, c = prompts_of([36, 11, 11], seed=9)
    engine = small(policy="priority", long_prefill_token_threshold=5, max_num_batched_tokens=12)
    plans = []
    schedule = engine.loop.scheduler.schedule

    def recorded() -> Any:
        before = engine.loop.scheduler.stats.num_scheduled_tokens
        plan = schedule()
        if plan is not None:
            plans.append(plan)
            used = engine.loop.scheduler.stats.num_scheduled_tokens - before
            assert used == plan.num_tokens <= 12
        return plan

    engine.loop.scheduler.schedule = recorded  # type: ignore[method-assign]
    first = engine.add(a, greedy(6), priority=5)
    for _ in range(4):
        engine.step()
    others = [
        engine.add(b, greedy(14), priority=0),
        engine.add(c, greedy(14), priority=1),
    ]
    outcomes = engine.run()
    assert outcomes[first].request.num_preemptions > 0
    evictions = [plan for plan in plans if plan.preempted]
    assert evictions
    for plan in evictions:
        served = set(plan.refs)
        assert not served & set(plan.preempted)
        assert plan.num_rows == 2
    for name, prompt, n in zip([first, *others], (a, b, c), (6, 14, 14)):
        assert outcomes[name].token_ids == plain_tokens(prompt, greedy(n))


@pytest.mark.parametrize("device", ["queued", "fake"])
def test_ends_at_the_model_length(device):
    """Case 6: prompt 63 + 1 and prompt 60 + 4 of max_model_len 64."""
    for length, n in ((63, 1), (60, 4), (60, 100)):
        (prompt,) = prompts_of([length], seed=3)
        engine = small(device, num_blocks=40, max_model_len=64)
        name = engine.add(prompt, greedy(n))
        outcome = engine.run()[name]
        assert outcome.finish_reason == "length"
        assert outcome.token_ids == plain_tokens(prompt, greedy(min(n, 4)))
        assert engine.loop.scheduler.stats.num_steps == min(n, 4)


def test_single_token_requests_use_all_rows():
    """Case 6: 100 requests of one token and 4 rows take 25 steps, since a row is free in the step
    after the one that yields its last token was launched."""
    engine = small(num_blocks=40)
    prompts = prompts_of([6] * 100, seed=1)
    names = [engine.add(prompt, greedy(1)) for prompt in prompts]
    outcomes = engine.run()
    assert engine.loop.scheduler.stats.num_steps == 25
    for name, prompt in zip(names[:8], prompts):
        assert outcomes[name].token_ids == plain_tokens(prompt, greedy(1))


def test_equal_prompts_that_fill_blocks():
    """Case 9: many equal prompts of k * block tokens at the same time."""
    for length in (4, 8, 12):
        (prompt,) = prompts_of([length], seed=length)
        engine = small()
        names = [engine.add(prompt, greedy(5)) for _ in range(33)]
        outcomes = engine.run()
        for name in names:
            assert outcomes[name].token_ids == plain_tokens(prompt, greedy(5))
        assert outcomes[names[-1]].request.num_cached_tokens == (length - 1) // 4 * 4


@pytest.mark.parametrize("device", ["queued", "fake"])
@pytest.mark.parametrize("num_steps", range(1, 7))
def test_abort_in_mid_prefill_leaves_no_bad_cache_entry(num_steps, device):
    """Case 12."""
    (prompt,) = prompts_of([40], seed=12)
    engine = small(device, long_prefill_token_threshold=8)
    name = engine.add(prompt, greedy(8))
    for _ in range(num_steps):
        engine.step()
    assert engine.loop.abort(name)
    for other in prompts_of([25, 25], seed=13):
        engine.add(other, greedy(3))
    engine.run()
    again = engine.add(prompt, greedy(8))
    assert engine.run()[again].token_ids == plain_tokens(prompt, greedy(8))
    assert is_clean(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_not_a_number_hurts_one_request(device, kind, value):
    """Case 19: at step 3 in one row."""
    engine = small(device, num_blocks=40)
    prompts = prompts_of([9, 10, 11], seed=19)
    names = [engine.add(prompt, KINDS[kind](8), seed=2) for prompt in prompts]

    def poison(logits: torch.Tensor, call: int) -> None:
        if call == 3:
            logits[1, 17] = value

    hook_head(engine, poison)
    outcomes = engine.run()
    bad = outcomes[names[1]]
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, RequestFailed)
    assert "not finite" in str(bad.error)
    assert bad.token_ids == plain_tokens(prompts[1], KINDS[kind](8), seed=2)[:3]
    assert engine.loop.scheduler.stats.num_errors == 1
    for index in (0, 2):
        expected = plain_tokens(prompts[index], KINDS[kind](8), seed=2)
        assert outcomes[names[index]].token_ids == expected
    hits = {}
    for prompt in prompts:
        name = engine.add(prompt, KINDS[kind](8), seed=2)
        outcome = engine.run()[name]
        hits[name] = outcome.request.num_cached_tokens
        assert outcome.token_ids == plain_tokens(prompt, KINDS[kind](8), seed=2)
    assert list(hits.values()) == [8, 0, 8]


@pytest.mark.parametrize("vocab_size", [8193, 10000])
@pytest.mark.parametrize("device", ["queued", "fake"])
def test_vocabularies_that_fill_no_tile(device, vocab_size):
    """Case 20: only legal ids, the last one among them, and the plain engine's tokens."""
    folder = tiny_llama(vocab_size=vocab_size, eos_token_id=2)
    engine = TinyEngine(folder, device=device)
    loose = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True, logprobs=2)
    prompts = [*prompts_of([5, 9], seed=1), [vocab_size - 1, vocab_size - 2]]
    expected = {}
    for params in (greedy(8), seeded(8), loose):
        for prompt in prompts:
            name = engine.add(prompt, params)
            expected[name] = plain_tokens(prompt, params, folder=folder)
    outcomes = engine.run()
    for name, tokens in expected.items():
        assert all(0 <= token < vocab_size for token in tokens)
        assert outcomes[name].token_ids == tokens

    def only_last(logits: torch.Tensor, call: int) -> None:
        logits[:, :-1] = -torch.inf

    hook_head(engine, only_last)
    names = [engine.add(prompts[0], params) for params in (greedy(4), seeded(4), loose)]
    for name, count in zip(names, (4, 4, 20)):
        assert engine.run()[name].token_ids == [vocab_size - 1] * count


def test_a_row_without_a_legal_token_ends_in_an_error():
    """Case 20."""
    engine = small("fake")
    names = [engine.add(prompt, greedy(4)) for prompt in prompts_of([5, 6], seed=1)]

    def mask(logits: torch.Tensor, call: int) -> None:
        if call == 1:
            logits[0] = -torch.inf

    hook_head(engine, mask)
    outcomes = engine.run()
    assert outcomes[names[0]].finish_reason == "error"
    assert "no token is legal" in str(outcomes[names[0]].error)
    assert outcomes[names[1]].token_ids == plain_tokens(prompts_of([5, 6], seed=1)[1], greedy(4))


@pytest.mark.parametrize("bad", [-1, 1000, 2**31 - 1])
def test_impossible_ids_from_the_device(bad):
    """Case 25: one request ends with "error", the loop goes on."""
    engine = small("queued")
    prompts = prompts_of([5, 6], seed=25)
    names = [engine.add(prompt, greedy(6)) for prompt in prompts]

    def inject(result: StepResult, plan: Any) -> None:
        if plan.step == 2:
            result.token_ids[0, 0] = bad

    hook_results(engine, inject)
    outcomes = engine.run()
    victim = engine.outcomes[names[0]]
    assert victim.finish_reason == "error"
    assert str(bad) in str(victim.error)
    assert victim.token_ids == plain_tokens(prompts[0], greedy(6))[:2]
    assert outcomes[names[1]].token_ids == plain_tokens(prompts[1], greedy(6))
    assert is_clean(engine)


@pytest.mark.parametrize(
    ("prompt", "changes"),
    [
        ([999999], {}),
        ([1000], {}),
        ([5, -1], {}),
        ([], {}),
        ([5], {"stop_token_ids": [999999], "min_tokens": 1}),
        ([5], {"stop_token_ids": [1000]}),
    ],
)
def test_bad_ids_are_refused(prompt, changes):
    """Case 26: refused before anything runs; a normal request works after it, and with it."""
    engine = small("queued")
    (good,) = prompts_of([5], seed=26)
    name = engine.add(good, greedy(4))
    with pytest.raises(RequestError) as caught:
        engine.add(prompt, greedy(4, **changes))
    assert caught.value.field in ("prompt_token_ids", "stop_token_ids")
    again = engine.add(good, greedy(4))
    outcomes = engine.run()
    assert outcomes[name].token_ids == plain_tokens(good, greedy(4))
    assert outcomes[again].token_ids == plain_tokens(good, greedy(4))


def test_a_request_that_only_the_sampler_can_refuse():
    """Case 26: more logprobs than there are, past the front door: it fails alone."""
    engine = small("queued")
    good, bad = prompts_of([5, 6], seed=26)
    names = [engine.add(good, greedy(4)), engine.add(bad, greedy(4, logprobs=10**6))]
    outcomes = engine.run()
    assert outcomes[names[0]].token_ids == plain_tokens(good, greedy(4))
    assert isinstance(outcomes[names[1]].error, RequestError)
    assert outcomes[names[1]].error.field == "logprobs"
    again = engine.add(bad, greedy(4))
    assert engine.run()[again].token_ids == plain_tokens(bad, greedy(4))


def abort_many(engine: TinyEngine, count: int, rng: random.Random) -> None:
    live: list[str] = []
    for _ in range(count):
        length = rng.randint(1, 40)
        prompt = [rng.randint(3, 999) for _ in range(length)]
        live.append(engine.add(prompt, rng.choice([greedy, seeded])(rng.randint(1, 15))))
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if rng.random() < 0.9:
            name = live.pop(rng.randrange(len(live)))
            is_known = engine.outcomes[name].finish_reason is None
            assert engine.loop.abort(name) == is_known
            assert not engine.loop.abort(name)
    assert not engine.loop.abort("unknown")
    engine.run(limit=2_000 + 4 * count)  # those that are left wait for each other
    assert is_clean(engine)
    engine.outcomes.clear()


@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
def test_random_aborts_leave_nothing(device):
    """Case 32: before, during and after its steps; everything is free, and an answer is right."""
    engine = small(device, long_prefill_token_threshold=8)
    abort_many(engine, 60, random.Random(1))
    (prompt,) = prompts_of([9])
    assert engine.generate([prompt], greedy()) == [plain_tokens(prompt, greedy())]


def grows_by(engine: TinyEngine, count: int) -> int:
    rng = random.Random(2)
    abort_many(engine, 100, rng)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    abort_many(engine, count, rng)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


def test_aborts_do_not_grow_memory():
    """Case 32: the bytes that 300 requests leave behind; one kept request alone has over 500."""
    assert grows_by(small("queued", long_prefill_token_threshold=8), 300) < 150_000


@pytest.mark.long
def test_ten_thousand_aborts_do_not_grow_memory():
    """Case 32."""
    assert grows_by(small("queued", long_prefill_token_threshold=8), 10_000) < 400_000


# Faults of a whole step.


class Fault(Exception):
    pass


def fail_once(engine: TinyEngine, place: str, step: int, error: BaseException) -> None:
    """Raise `error` at `place` of the step with that number."""
    runner, head = engine.worker._assembled.runner, engine.worker._assembled.runner._head
    target, name = {
        "rows": (runner, "_change_rows"),
        "describe": (runner._builder, "describe"),
        "inputs": (runner._builder, "launch"),
        "metadata": (runner._executor, "prepare"),
        "layers": (runner._executor, "run"),
        "head": (head, "run"),
        "result copy": (engine.device, "copy_to_host"),
        "result": (head, "run"),
    }[place]
    original, calls = getattr(target, name), iter(range(10**9))

    def fail(*args: Any) -> Any:
        raise error

    def hooked(*args: Any, **kwargs: Any) -> Any:
        is_due = next(calls) == step
        if is_due and place != "result":
            raise error
        outcome = original(*args, **kwargs)
        if is_due:
            outcome._logprobs = fail
        return outcome

    setattr(target, name, hooked)


PLACES = ["rows", "describe", "inputs", "metadata", "layers", "head", "result copy", "result"]


@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_ends_its_requests_only(place, device):
    """Those in the step end with its error; who waits is served, and later ones are right."""
    engine = small(device, max_num_seqs=2, num_blocks=40)
    prompts = prompts_of([9, 10, 11, 12], seed=7)
    fail_once(engine, place, 3, Fault(place))
    names = [engine.add(prompt, greedy(8, logprobs=None)) for prompt in prompts]
    outcomes = engine.run()
    for name in names[:2]:
        assert outcomes[name].finish_reason == "error"
        assert isinstance(outcomes[name].error, Fault)
        full = plain_tokens(prompts[names.index(name)], greedy(8))
        assert outcomes[name].token_ids == full[: len(outcomes[name].token_ids)]
        assert len(outcomes[name].token_ids) <= 3
    for name, prompt in zip(names[2:], prompts[2:]):
        assert outcomes[name].token_ids == plain_tokens(prompt, greedy(8))
    for _ in range(2):
        assert engine.generate(prompts, greedy(8)) == [
            plain_tokens(prompt, greedy(8)) for prompt in prompts
        ]
    assert engine.loop.scheduler.stats.num_errors == 2
    assert is_clean(engine)


@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("place", PLACES)
def test_many_failing_steps_use_nothing_up(place, device):
    """Each failed step gives its staging and result slots back."""
    engine = small(device)
    (prompt,) = prompts_of([9])
    for _ in range(6):
        fail_once(engine, place, 1, Fault(place))
        name = engine.add(prompt, greedy(8))
        assert isinstance(engine.run()[name].error, Fault)
    assert engine.generate([prompt], greedy(8)) == [plain_tokens(prompt, greedy(8))]


@pytest.mark.parametrize("kernel", ["model.run_layers", "model.draw", "advance"])
def test_a_kernel_that_fails_late(kernel):
    """On a device with a queue the fault shows when somebody waits."""
    engine = small("fake")
    prompts = prompts_of([9, 10], seed=7)
    calls = iter(range(10**9))

    def failing(original: Any) -> Any:
        def kernel(*args: Any) -> Any:
            if next(calls) == 3:
                raise Fault
            return original(*args)

        return kernel

    if kernel == "advance":
        head = engine.worker._assembled.runner._head
        head._advance = failing(head._advance)
    else:
        name = kernel.removeprefix("model.")
        setattr(engine.worker.model, name, failing(getattr(engine.worker.model, name)))
    names = [engine.add(prompt, greedy(8)) for prompt in prompts]
    outcomes = engine.run()
    assert all(isinstance(outcomes[name].error, Fault) for name in names)
    for _ in range(3):
        assert engine.generate(prompts, greedy(8)) == [
            plain_tokens(prompt, greedy(8)) for prompt in prompts
        ]


@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_anywhere_leaves_the_loop_usable(error, place, device):
    engine = small(device)
    (prompt,) = prompts_of([9])
    for step in (1, 3):
        fail_once(engine, place, step, error())
        name = engine.add(prompt, greedy(8))
        with pytest.raises(error):
            engine.run()
        engine.loop.abort(name)
        engine.run()
        assert engine.generate([prompt], greedy(8)) == [plain_tokens(prompt, greedy(8))]
    assert is_clean(engine)


def test_a_lost_device_is_passed_on():
    engine = small("queued")
    fail_once(engine, "layers", 1, DeviceLost("gone"))
    engine.add(prompts_of([9])[0], greedy(8))
    with pytest.raises(DeviceLost):
        engine.run()


def test_only_a_step_between_faults_is_late():
    """A fault at launch is booked after the older steps that are still in flight."""
    engine = small("fake")
    prompts = prompts_of([9, 10], seed=7)
    names = [engine.add(prompts[0], greedy(8))]
    fail_once(engine, "layers", 2, Fault())
    engine.step()
    engine.step()
    names.append(engine.add(prompts[1], greedy(8)))
    outcomes = engine.run()
    assert isinstance(engine.device, FakeDevice)
    assert outcomes[names[0]].token_ids == plain_tokens(prompts[0], greedy(8))[:2]
    assert all(isinstance(outcomes[name].error, Fault) for name in names)


def test_stopping_ids_and_eos():
    """An answer ends with the token that ends it, which is kept."""
    (prompt,) = prompts_of([9], seed=31)
    tokens = plain_tokens(prompt, greedy(12))
    cut = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    params = greedy(12, stop_token_ids=[tokens[cut]])
    for device in ("cpu", "queued", "fake"):
        engine = small(device)
        name = engine.add(prompt, params)
        outcome = engine.run()[name]
        assert outcome.token_ids == tokens[: cut + 1]
        assert outcome.finish_reason == "stop"
        assert outcome.request.stop_reason == tokens[cut]
    later = greedy(12, stop_token_ids=[tokens[cut]], min_tokens=cut + 2)
    assert tokens[cut] not in plain_tokens(prompt, later)[: cut + 1]
    engine = small("queued")
    name = engine.add(prompt, later)
    assert engine.run()[name].token_ids == plain_tokens(prompt, later)


def test_results_arrive_once_and_in_order():
    """Case 2: token indices rise without gaps over preemptions, whatever is in flight."""
    engine = small("fake", max_steps_in_flight=3)
    prompts = prompts_of([10, 10], seed=3)
    names = [engine.add(prompt, greedy(20)) for prompt in prompts]
    seen: dict[str, int] = dict.fromkeys(names, 0)
    for count in range(400):
        if not engine.loop.has_work():
            break
        for update, _ in engine.loop.step():
            name = update.request.request_id
            seen[name] += len(update.new_token_ids)
            assert update.request.num_output_tokens == seen[name]
        if count % 6 == 5:
            engine.loop.scheduler.preempt(names[count % 2])
    assert seen == dict.fromkeys(names, 20)
    assert np.array_equal(
        [r.request.output_token_ids.tolist() for r in engine.outcomes.values()],
        [plain_tokens(prompt, greedy(20)) for prompt in prompts],
    )
