"""Staging: ragged writes land exactly, host memory is not rewritten while the device may read it.

Cases 1 and 7 of bug_reports.md; specs/staging_and_pooling.md 1.9 and 2.11.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.batch import staged as staged_module
from pelton.batch.staged import StagedStep, Staging
from pelton.device.cpu import CPUDevice
from pelton.device.cuda import CUDADevice
from pelton.device.fake import FakeDevice
from pelton.device.protocol import Device
from pelton.errors import ConfigError, IntegrityError

NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


def read(device: Device, tensor: torch.Tensor) -> np.ndarray:
    host = device.host_buffer(tuple(tensor.shape), tensor.dtype)
    device.copy_to_host(host, tensor)
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
        pytest.param(FakeDevice, id="fake"),
        pytest.param(lambda: CPUDevice(1), id="cpu"),
        pytest.param(CUDADevice, id="cuda", marks=pytest.mark.gpu),
    ],
)
def test_ragged_writes_over_many_steps_equal_a_numpy_model(make):
    """Case 1. Growth and shrink with two steps in flight; every step's state is compared, as the
    step's own kernels would have seen it."""
    rng = np.random.default_rng(0)
    device = make()
    staging = Staging(device, depth=2)
    # An odd number of words before an int64 table: its rows must still be aligned.
    shapes = {
        "a": (3, 7, torch.int32),
        "b": (5, 3, torch.int64),
        "c": (4, 1500, torch.float32),
        "d": (1, 1, torch.int32),
        "e": (2, 5000, torch.int64),
    }
    tables = {name: staging.tensor(name, *shape) for name, shape in shapes.items()}
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
            device.copy_to_host(host, table.tensor)
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


def test_a_step_without_changes_copies_nothing():
    """Case 1; specs/staging_and_pooling.md 1.9 T3: zero publishes in an unchanged decode step."""
    device = FakeDevice()
    staging = Staging(device, depth=2)
    table = staging.tensor("t", 2, 4, torch.int32)
    section = staging.section("s", 4)
    staging.allocate()
    copies = []
    for values, write in (
        ([1, 2, 3, 4], True),
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 4], False),
        ([1, 2, 3, 5], False),
        ([1, 2, 3, 5], True),
        ([1, 2, 3, 4], False),
    ):
        before = device.num_copies_to_device
        step = staging.begin()
        section.values(step)[:] = values
        if write:
            table.stage(0, 0, [7])
        staging.flush(step)
        step.release()
        assert read(device, section.tensor).tolist() == values
        copies.append(device.num_copies_to_device - before)
    assert copies == [2, 0, 0, 1, 1, 1]


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


def run_ahead(depth: int, in_flight: int, num_steps: int = 12) -> list[list[int]]:
    """What kernels of each step saw of a section and of a staged row that every step changes."""
    device = FakeDevice()
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


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_step_sees_its_own_values(depth):
    """Case 1, on a device that reads as late as it may."""
    assert run_ahead(depth, in_flight=depth) == EXPECTED


def test_more_steps_in_flight_than_the_ring_is_deep_wait_for_the_fence():
    """Case 1: who launches too far ahead waits, and reads nothing wrong."""
    assert run_ahead(depth=1, in_flight=6) == EXPECTED


def test_without_the_fence_the_ring_shows_wrong_values(monkeypatch):
    """Case 1: the net has no hole. The same run without the wait in `lease` must go wrong."""
    lease = StagedStep.lease

    def without_wait(self: StagedStep) -> None:
        self._fence = None
        lease(self)

    monkeypatch.setattr(StagedStep, "lease", without_wait)
    assert run_ahead(depth=1, in_flight=6) != EXPECTED
    # In the queue's own depth the ring alone is enough; that is what it is for.
    assert run_ahead(depth=2, in_flight=2) == EXPECTED


def test_a_fence_before_the_last_reader_shows_wrong_values():
    """Case 1: releasing before the step's copies are queued frees the slot too early."""
    device = FakeDevice()
    staging = Staging(device, depth=0)  # a ring of one slot
    section = staging.section("s", 2)
    staging.allocate()
    seen: list[list[int]] = []
    for i in range(2):
        step = staging.begin()
        step.release()  # too early
        section.values(step)[:] = i
        staging.flush(step)
        device.launch(lambda header: seen.append(header.tolist()), section.tensor)
    device.synchronize()
    assert seen[0] != [0, 0]


def test_retired_slots_are_poisoned():
    """Case 1: a reader of a slot that was given back sees -7, never plausible numbers."""
    device = FakeDevice()
    staging = Staging(device, depth=0)
    table = staging.tensor("t", 1, 4, torch.int32)
    staging.section("s", 3)
    staging.allocate()
    step = staging.begin()
    step.header[:] = [1, 2, 3]
    table.stage(0, 0, [1, 2, 3, 4])
    staging.flush(step)
    step.release()
    late = step.header, step._writes_tensor.numpy()
    assert staging.begin() is step
    assert (late[0] == staged_module._POISON).all()
    assert (late[1] == staged_module._POISON).all()
    assert read(device, table.tensor).tolist() == [[1, 2, 3, 4]], "the device had read them before"


def test_a_slot_that_is_still_held_is_not_given_out():
    staging = Staging(FakeDevice(), depth=1)
    staging.section("s", 1)
    staging.allocate()
    first, second = staging.begin(), staging.begin()
    with pytest.raises(IntegrityError, match="still holds"):
        staging.begin()
    first.release()
    assert staging.begin() is first, "a refused request does not skip a slot"
    second.release()
    assert staging.begin() is second


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
