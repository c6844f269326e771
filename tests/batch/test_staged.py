"""Staging: ragged writes land exactly, host memory is not rewritten while the device may read it.

Cases 1 and 7 of bug_reports.md; specs/staging_and_pooling.md 1.9 and 2.11.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import TinyEngine, tiny_llama

from pelton.batch import staged as staged_module
from pelton.batch.staged import StagedStep, Staging
from pelton.device.cpu import CPUDevice
from pelton.device.cuda import CUDADevice
from pelton.device.fake import FakeDevice, FakeEvent
from pelton.device.protocol import Device
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError, IntegrityError

NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


def read(device: Device, tensor: torch.Tensor) -> np.ndarray:
    host = device.host_buffer(tuple(tensor.shape), tensor.dtype)
    device.deliver(host, tensor)
    device.synchronize()
    return host.numpy()


def random_values(rng: np.random.Generator, dtype: torch.dtype, n: int) -> np.ndarray:
    if dtype == torch.float32:
        return rng.standard_normal(n).astype(np.float32)
    info = np.iinfo(NUMPY[dtype])
    return rng.integers(info.min, info.max, n, dtype=NUMPY[dtype], endpoint=True)


@pytest.mark.parametrize(
    "make",
    [
        *(
            pytest.param(partial(FakeDevice, mode, cold_bytes=10_000), id=f"fake/{mode}")
            for mode in STAGING_MODES
        ),
        *(pytest.param(partial(CPUDevice, 1, mode), id=f"cpu/{mode}") for mode in STAGING_MODES),
        *(
            pytest.param(partial(CUDADevice, 0, mode), id=f"cuda/{mode}", marks=pytest.mark.gpu)
            for mode in STAGING_MODES
        ),
    ],
)
def test_ragged_writes_over_many_steps_equal_a_numpy_model(make):
    """Case 1. Growth and shrink with two steps in flight; every step's state is compared, as the
    step's own kernels would have seen it."""
    rng = np.random.default_rng(0)
    device = make()
    if isinstance(device, CUDADevice):
        device.host_memory._cold_bytes = 10_000
    staging = Staging(device, depth=2, least_words=16)
    # An odd number of words before an int64 table: its rows must still be aligned.
    shapes = {
        "a": (3, 7, torch.int32),
        "b": (5, 3, torch.int64),
        "c": (4, 1500, torch.float32),
        "d": (1, 1, torch.int32),
        "e": (2, 5000, torch.int64),
    }
    tables = {
        name: staging.tensor(name, *shape, is_cold=name in "ce") for name, shape in shapes.items()
    }
    staging.section("header", 3)
    staging.allocate()
    model = {name: np.zeros(shape[:2], NUMPY[shape[2]]) for name, shape in shapes.items()}
    pending: list[tuple[list[tuple[torch.Tensor, np.ndarray]], object]] = []

    def check() -> None:
        snapshots, event = pending.pop(0)
        event.wait()  # type: ignore[attr-defined]
        for host, expected in snapshots:
            assert host.numpy().tobytes() == expected.tobytes()

    for step in range(24):
        leased = staging.begin()
        leased.header[:] = step
        largest = (3, 17, 1500, 4090)[step % 4]
        for name, (num_rows, width, dtype) in shapes.items():
            for row in range(num_rows):
                at = 0
                while at < width and rng.random() < 0.7:
                    start = int(rng.integers(at, width))
                    n = int(rng.integers(0, min(largest, width - start) + 1))
                    values = random_values(rng, dtype, n)
                    tables[name].stage(row, start, values)
                    model[name][row, start : start + n] = values
                    at = start + n + int(rng.integers(0, 3))
        staging.flush(leased)
        snapshots = []
        for name, table in tables.items():
            host = device.host_buffer(model[name].shape, table.dtype)
            device.deliver(host, table.tensor)
            snapshots.append((host, model[name].copy()))
        leased.release()
        pending.append((snapshots, device.record_event()))
        if len(pending) == 2:
            check()
    while pending:
        check()


def test_addresses_are_fixed_while_buffers_grow():
    device = CPUDevice(1)
    staging = Staging(device, depth=1)
    table = staging.tensor("t", 2, 1000, torch.int32)
    section = staging.section("s", 4)
    staging.allocate()
    addresses = table.tensor.data_ptr(), section.tensor.data_ptr()
    for n in (1, 1000, 3):
        step = staging.begin()
        step.header[:] = n
        table.stage(1, 0, np.arange(n))
        staging.flush(step)
        step.release()
    assert (table.tensor.data_ptr(), section.tensor.data_ptr()) == addresses


@pytest.mark.parametrize(
    ("row", "start", "n"), [(0, 3, 2), (0, -1, 1), (3, 0, 1), (-1, 0, 1), (1, 5, 1), (2, 0, 5)]
)
def test_a_write_that_leaves_its_row_is_refused(row, start, n):
    staging = Staging(CPUDevice(1), depth=1)
    table = staging.tensor("tokens", 3, 4, torch.int32)
    staging.allocate()
    with pytest.raises(IntegrityError, match=r"tokens.*leaves"):
        table.stage(row, start, np.zeros(n, np.int32))
    assert staging.num_writes == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_values_that_the_type_cannot_hold_are_refused(dtype):
    staging = Staging(CPUDevice(1), depth=1)
    table = staging.tensor("counts", 3, 4, dtype)
    staging.allocate()
    with pytest.raises(IntegrityError, match="counts"):
        table.stage(0, 0, [1.5])
    if dtype == torch.int32:
        with pytest.raises(IntegrityError, match="counts"):
            table.stage(0, 0, [2**31])
        with pytest.raises(IntegrityError, match="counts"):
            table.stage(0, 0, np.array([-(2**40)]))
    assert staging.num_writes == 0
    table.stage(0, 0, [])
    table.stage(0, 0, [2**31 - 1, -(2**31)])
    assert staging.num_writes == 1


@pytest.mark.parametrize(
    "writes",
    [
        [(0, 0, 3), (0, 2, 2)],
        [(0, 2, 2), (0, 0, 3)],
        [(1, 1, 1), (0, 0, 1), (1, 1, 1)],
        [(0, 0, 4), (1, 3, 1), (0, 2, 1)],
    ],
)
def test_overlapping_writes_of_one_step_are_refused_where_devices_poison(writes):
    device = FakeDevice()
    staging = Staging(device, depth=1)
    table = staging.tensor("t", 2, 4, torch.int32)
    staging.allocate()
    step = staging.begin()
    for row, start, n in writes:
        table.stage(row, start, [1] * n)
    with pytest.raises(IntegrityError, match="overlap"):
        staging.flush(step)


def test_writes_that_touch_are_no_overlap():
    device = FakeDevice()
    staging = Staging(device, depth=1)
    table = staging.tensor("t", 2, 4, torch.int32)
    staging.allocate()
    step = staging.begin()
    for row, start, values in ((1, 0, [5]), (0, 2, [3, 4]), (0, 0, [1, 2])):
        table.stage(row, start, values)
    staging.flush(step)
    assert read(device, table.tensor).tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]


@pytest.mark.parametrize(("mode", "copies"), [("aliased", 0), ("pinned", 1), ("pageable", 1)])
def test_a_changed_step_is_one_launch_and_another_nothing(mode, copies):
    """Case 1; specs/staging_and_pooling.md 1.9 T3: zero publishes in an unchanged decode step."""
    device = FakeDevice(mode)
    staging = Staging(device, depth=2)
    table = staging.tensor("t", 2, 4, torch.int32)
    section = staging.section("s", 4)
    staging.allocate()
    counts = []
    for values, write in (
        ([1, 2, 3, 4], True),
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 5], False),
        ([1, 2, 3, 5], True),
        ([1, 2, 3, 4], False),
    ):
        num_copies, num_launches = device.num_copies_to_device, device.num_launches
        step = staging.begin()
        section.values(step)[:] = values
        if write:
            table.stage(0, 0, [7])
        staging.flush(step)
        step.release()
        launches = device.num_launches - num_launches
        counts.append((launches, device.num_copies_to_device - num_copies))
        assert read(device, section.tensor).tolist() == values
    one = (1 + copies, copies)
    assert counts == [one, (0, 0), (0, 0), one, one, one]
    assert staging.stats.num_publishes == 4


def test_of_a_header_only_what_changed_travels():
    staging = Staging(FakeDevice(), depth=1)
    section = staging.section("s", 1000)
    staging.allocate()
    step = staging.begin()
    section.values(step)[:] = 0
    staging.flush(step)
    step.release()
    before = staging.stats.num_words
    step = staging.begin()
    section.values(step)[:] = 0
    section.values(step)[[500, 502]] = 7
    staging.flush(step)
    step.release()
    assert staging.stats.num_words - before == 3 + 3  # target, two ends; three words
    assert read(staging.device, section.tensor).nonzero()[0].tolist() == [500, 502]


def test_a_step_without_rows_flushes_its_writes_and_no_header():
    device = FakeDevice()
    staging = Staging(device, depth=1)
    table = staging.tensor("t", 1, 4, torch.int32)
    section = staging.section("s", 2)
    staging.allocate()
    step = staging.begin()  # its header is never filled
    table.stage(0, 1, [9])
    staging.flush_writes(step)
    step.release()
    assert read(device, table.tensor).tolist() == [[0, 9, 0, 0]]
    assert read(device, section.tensor).tolist() == [0, 0]


def goes_wrong(run: Callable[[], object], right: object) -> bool:
    """Whether something else comes out, or poison is taken for places to write to."""
    try:
        return run() != right
    except IntegrityError:
        raise  # refused, which is no hole
    except (IndexError, RuntimeError):
        return True


def run_ahead(
    depth: int, in_flight: int, num_steps: int = 12, mode: str = "auto"
) -> list[list[int]]:
    """What kernels of each step saw of a section and of a staged row that every step changes."""
    device = FakeDevice(mode)
    staging = Staging(device, depth=depth)
    table = staging.tensor("t", 1, 3, torch.int32)
    section = staging.section("s", 3)
    staging.allocate()
    seen: list[list[int]] = []

    def kernel(header: torch.Tensor, row: torch.Tensor) -> None:
        seen.append(header.tolist() + row[0].tolist())

    events = []
    for i in range(num_steps):
        if len(events) == in_flight:
            events.pop(0).wait()
        step = staging.begin()
        section.values(step)[:] = i
        table.stage(0, 0, [i, i, i])
        staging.flush(step)
        device.launch(kernel, section.tensor, table.tensor)
        step.release()
        events.append(device.record_event())
    device.synchronize()
    return seen


EXPECTED = [[i] * 6 for i in range(12)]


@pytest.mark.parametrize("mode", STAGING_MODES)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_step_sees_its_own_values(depth, mode):
    """Case 1, on a device that reads as late as it may."""
    assert run_ahead(depth, in_flight=depth, mode=mode) == EXPECTED


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_more_steps_in_flight_than_the_ring_is_deep_wait_for_the_fence(mode):
    """Case 1; specs/staging_and_pooling.md 0.4a, steps that nobody waits for: who launches too far
    ahead waits, and reads nothing wrong."""
    assert run_ahead(depth=1, in_flight=6, mode=mode) == EXPECTED


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_without_the_fence_the_ring_shows_wrong_values(mode, monkeypatch):
    """Case 1: the net has no hole. The same run without the wait in `lease` must go wrong."""
    lease = StagedStep.lease

    def without_wait(self: StagedStep) -> None:
        self._fence = None
        lease(self)

    monkeypatch.setattr(StagedStep, "lease", without_wait)
    assert goes_wrong(lambda: run_ahead(depth=1, in_flight=6, mode=mode), EXPECTED)
    # In the queue's own depth the ring alone is enough; that is what it is for.
    assert run_ahead(depth=2, in_flight=2, mode=mode) == EXPECTED


def run_and_read_late(releases_early: bool, mode: str) -> list[list[int]]:
    """Spec 0.4c: work that is queued behind the step's result, here a copy of the slot's words."""
    device = FakeDevice(mode)
    staging = Staging(device, depth=0)  # a ring of one slot
    section = staging.section("s", 2)
    staging.allocate()
    seen: list[list[int]] = []
    for i in range(4):
        step = staging.begin()
        section.values(step)[:] = i
        if releases_early:
            step.release()
            step.is_leased = True
        staging.flush(step)
        device.launch(lambda header: seen.append(header.tolist()), section.tensor)
        if releases_early:
            step.is_leased = False
        else:
            step.release()
    device.synchronize()
    return seen


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_a_fence_before_the_last_reader_shows_wrong_values(mode):
    """Case 1, specs/staging_and_pooling.md 0.4c."""
    right = [[i, i] for i in range(4)]
    assert run_and_read_late(False, mode) == right
    assert goes_wrong(lambda: run_and_read_late(True, mode), right)


def test_a_step_publishes_once_and_not_after_its_release():
    """specs/staging_and_pooling.md 0.4b: a second publish would rewrite what the first one's
    kernels may not have read."""
    device = FakeDevice()
    staging = Staging(device, depth=1)
    table = staging.tensor("t", 1, 4, torch.int32)
    staging.allocate()
    step = staging.begin()
    table.stage(0, 0, [1])
    staging.flush(step)
    table.stage(0, 1, [2])
    with pytest.raises(IntegrityError, match="publishes its staging slot once"):
        staging.flush(step)
    step.release()
    with pytest.raises(IntegrityError, match="after its step had given it back"):
        staging.flush(step)
    assert read(device, table.tensor).tolist() == [[1, 0, 0, 0]]


def test_a_step_that_turns_the_ring_twice_is_refused():
    """specs/staging_and_pooling.md 0.4b: as a participant would that staged and flushed for itself
    in the midst of a step."""
    device = FakeDevice()
    staging = Staging(device, depth=2)
    table = staging.tensor("t", 1, 4, torch.int32)
    staging.allocate()
    step = staging.begin()
    table.stage(0, 0, [1])
    staging.flush(step)
    with pytest.raises(IntegrityError, match="while a step still holds its own"):
        staging.begin()
    step.release()
    assert staging.begin() is not step, "a refused request skips no slot, and takes none"
    assert staging.stats.num_steps == 2


def test_a_participant_that_turns_the_ring_again_fails_the_step():
    """The same in a whole engine: its requests end with an error, and no token is wrong."""
    engine = TinyEngine(tiny_llama(), device="fake")
    runner = engine.worker._assembled.runner

    def again(batch: object) -> None:
        runner._staging.flush_writes(runner._staging.begin())

    runner._before_hooks = (*runner._before_hooks, again)
    name = engine.add([1, 2, 3])
    outcome = engine.run()[name]
    assert isinstance(outcome.error, IntegrityError)
    assert outcome.token_ids == []


def rotate_twice(num_steps: int = 8) -> list[list[int]]:
    """A ring for two steps of which every step takes two slots, one after the other."""
    device = FakeDevice()
    staging = Staging(device, depth=2)
    table = staging.tensor("t", 1, 2, torch.int32)
    staging.allocate()
    seen: list[list[int]] = []
    events = []
    for i in range(num_steps):
        if len(events) == 2:
            events.pop(0).wait()
        for column in range(2):
            step = staging.begin()
            table.stage(0, column, [i])
            staging.flush(step)
            step.release()
        device.launch(lambda row: seen.append(row[0].tolist()), table.tensor)
        events.append(device.record_event())
    device.synchronize()
    assert staging.stats.num_waits > 0
    return seen


def test_two_slots_in_a_step_wait_for_the_fence(monkeypatch):
    """Spec 0.4b: what is not refused, since one is released before the other is taken, is safe."""
    assert rotate_twice() == [[i, i] for i in range(8)]
    monkeypatch.setattr(FakeEvent, "wait", lambda self: None)
    assert goes_wrong(lambda: rotate_twice(), [[i, i] for i in range(8)])


def test_waits_are_counted_only_where_the_device_is_behind():
    device = FakeDevice()
    staging = Staging(device, depth=0)
    table = staging.tensor("t", 1, 2, torch.int32)
    staging.allocate()
    for i, waits in enumerate((0, 1, 1, 2)):
        if i == 2:
            device.synchronize()
        step = staging.begin()
        table.stage(0, 0, [i])
        staging.flush(step)
        step.release()
        assert staging.stats.num_waits == waits


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_retired_slots_are_poisoned(mode):
    """Case 1: a reader of a slot that was given back sees -7, never plausible numbers."""
    device = FakeDevice(mode)
    staging = Staging(device, depth=0)
    table = staging.tensor("t", 1, 4, torch.int32)
    staging.section("s", 3)
    staging.allocate()
    step = staging.begin()
    step.header[:] = [1, 2, 3]
    table.stage(0, 0, [1, 2, 3, 4])
    staging.flush(step)
    step.release()
    assert step._block is not None
    late = step.header, step._block.words
    assert staging.begin() is step
    assert (late[0] == staged_module._POISON).all()
    assert (late[1] == staged_module._POISON).all()
    assert read(device, table.tensor).tolist() == [[1, 2, 3, 4]], "the device had read them before"


def test_a_block_that_grows_is_read_before_it_is_let_go():
    """Spec 1.9 and 2.6: the old block's readers have run, and later ones would see poison."""
    device = FakeDevice()
    staging = Staging(device, depth=0, least_words=4)
    table = staging.tensor("t", 1, 100, torch.int32)
    staging.allocate()
    blocks, seen = [], []
    for n in (1, 2, 9, 10, 60, 3):
        step = staging.begin()
        table.stage(0, 0, np.full(n, n, np.int32))
        staging.flush(step)
        device.launch(lambda row, n=n: seen.append(row[0, :n].tolist()), table.tensor)
        step.release()
        assert step._block is not None
        blocks.append(step._block)
    device.synchronize()
    assert seen == [[n] * n for n in (1, 2, 9, 10, 60, 3)]
    assert [len(block.words) for block in blocks] == [4, 8, 16, 16, 64, 64]
    for old, new in itertools.pairwise(blocks):
        assert old is new or (old.words == staged_module._POISON).all()
    assert staging.stats.peak_host_bytes == staging.stats.host_bytes == 4 * 64


def test_memory_of_a_long_prompt_is_given_back_when_it_was_not_needed_for_long(monkeypatch):
    monkeypatch.setattr(staged_module, "_IDLE_LEASES", 5)
    device = FakeDevice()
    staging = Staging(device, depth=0, least_words=16)
    table = staging.tensor("t", 1, 1000, torch.int32)
    staging.allocate()

    def run(n: int) -> int:
        step = staging.begin()
        if n:
            table.stage(0, 0, np.full(n, n, np.int32))
        staging.flush(step)
        step.release()
        return staging.stats.host_bytes // 4

    assert run(1000) == 1024
    (slot,) = staging._ring
    large = slot._block
    assert large is not None
    assert [run(40) for _ in range(3)] == [1024] * 3
    assert run(500) == 1024  # needed again: counted anew
    sizes = [run(n) for n in (0, 40, 0, 0, 0, 0, 0)]
    assert sizes == [1024] * 5 + [64] * 2
    assert slot._block is not large
    assert (large.words == staged_module._POISON).all(), "a late reader sees no numbers"
    assert staging.stats.peak_host_bytes == 4 * 1024
    assert read(device, table.tensor)[0, :40].tolist() == [40] * 40


class Block:
    """A list, and nothing that this machine has."""

    def __init__(self, num_words: int) -> None:
        self.words = np.zeros(num_words, np.int32)

    def publish(self, num_words: int) -> torch.Tensor:
        return torch.from_numpy(self.words[:num_words].copy())


class StubDevice:
    """The verbs that staging may use."""

    torch_device = torch.device("cpu")
    poisons = True

    def zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def cold_table(self, name, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    def staging_block(self, num_words):
        return Block(num_words)

    def launch(self, kernel, *args):
        kernel(*args)

    def record_event(self):
        return CPUDevice(1).record_event()


def test_staging_needs_no_more_of_a_device_than_blocks_and_launches():
    """Upper rooms never see the mode: here is none."""
    staging = Staging(StubDevice(), depth=1)  # type: ignore[arg-type]
    table = staging.tensor("t", 2, 4, torch.int32)
    cold = staging.tensor("c", 2, 4, torch.int64, is_cold=True)
    section = staging.section("s", 2)
    staging.allocate()
    for i in range(5):
        step = staging.begin()
        section.values(step)[:] = i
        table.stage(1, 1, [i, i])
        cold.stage(0, 3, [2**40 + i])
        staging.flush(step)
        step.release()
    assert section.tensor.tolist() == [4, 4]
    assert table.tensor.tolist() == [[0] * 4, [0, 4, 4, 0]]
    assert cold.tensor.tolist() == [[0, 0, 0, 2**40 + 4], [0] * 4]


WRITE = st.tuples(st.sampled_from("ac"), st.integers(0, 2), st.integers(0, 11), st.integers(1, 12))
ACTION = st.one_of(
    st.tuples(st.just("stage"), WRITE),
    st.tuples(st.just("header"), st.integers(0, 3)),
    st.tuples(st.just("step"), st.none()),
    st.tuples(st.just("read"), st.none()),
    st.tuples(st.just("wait"), st.none()),
    st.tuples(st.just("drop"), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(STAGING_MODES),
    depth=st.integers(0, 2),
    actions=st.lists(ACTION, max_size=60),
)
def test_any_order_of_staging_and_reading_equals_plain_arrays(mode, depth, actions):
    """Stage, apply, read late, grow, shrink, reuse; the device runs when it is waited for, or when
    a slot's fence is."""
    device = FakeDevice(mode, cold_bytes=1)
    staging = Staging(device, depth=depth, least_words=4)
    tables = {name: staging.tensor(name, 3, 12, torch.int32, is_cold=name == "c") for name in "ac"}
    section = staging.section("s", 5)
    staging.allocate()
    model = {name: np.zeros((3, 12), np.int32) for name in "ac"} | {"s": np.zeros(5, np.int32)}
    staged: dict[tuple[str, int], list[tuple[int, np.ndarray]]] = {}
    late: list[tuple[torch.Tensor, np.ndarray]] = []
    header, value = 0, 0
    for kind, what in actions:
        if kind == "stage":
            name, row, start, n = what
            n = min(n, 12 - start)
            ranges = staged.setdefault((name, row), [])
            if all(start + n <= at or at + len(words) <= start for at, words in ranges):
                value += 1
                words = np.arange(value, value + n, dtype=np.int32)
                tables[name].stage(row, start, words)
                ranges.append((start, words))
        elif kind == "header":
            header = what
        elif kind == "drop":
            staging.drop_writes(0)
            staged.clear()
        elif kind == "step":
            step = staging.begin()
            section.values(step)[:] = [header, 0, 0, 0, header]
            staging.flush(step)
            step.release()
            model["s"][:] = [header, 0, 0, 0, header]
            for (name, row), ranges in staged.items():
                for start, words in ranges:
                    model[name][row, start : start + len(words)] = words
            staged.clear()
        elif kind == "read":
            for name, tensor in [(n, tables[n].tensor) for n in "ac"] + [("s", section.tensor)]:
                host = device.host_buffer(tuple(tensor.shape), torch.int32)
                device.deliver(host, tensor)
                late.append((host, model[name].copy()))
        else:
            device.synchronize()
    device.synchronize()
    for host, right in late:
        assert np.array_equal(host.numpy(), right)
    for name in "ac":
        assert np.array_equal(read(device, tables[name].tensor), model[name])


def test_dropped_writes_never_arrive():
    device = FakeDevice()
    staging = Staging(device, depth=1)
    table = staging.tensor("t", 2, 2, torch.int32)
    staging.allocate()
    step = staging.begin()
    table.stage(0, 0, [1, 2])
    mark = staging.num_writes
    table.stage(1, 0, [3, 4])
    staging.drop_writes(mark)
    staging.flush(step)
    assert read(device, table.tensor).tolist() == [[1, 2], [0, 0]]
    assert staging.num_writes == 0


def test_tables_beyond_32_bit_addresses_are_refused_with_the_way_out():
    staging = Staging(CPUDevice(1), depth=1)
    staging.tensor("t", 2**15 + 1, 2**16, torch.int32)
    with pytest.raises(ConfigError, match="lower max_num_seqs or max_model_len"):
        staging.allocate()
