"""Blocks go to host pages and come back, in the order of the device's queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.batch import BatchRig, new_row, plan_of

from pelton.attention import offload
from pelton.attention.offload import KVOffload
from pelton.attention.zeroing import NewBlockZeroing
from pelton.batch.participant import StepParticipant
from pelton.core.plan import NO_COPIES, PageCopies
from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice

NUM_BLOCKS, NUM_PAGES = 30, 12


class Moved:
    """A rig with KVOffload and NewBlockZeroing, over pools of two layouts, one of them shared."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.rig = BatchRig(
            device,
            max_num_seqs=6,
            declare=lambda rig: (
                KVOffload(rig.device, rig.staging, NUM_PAGES),
                NewBlockZeroing(rig.device, rig.staging, NUM_BLOCKS, rig.block_sizes),
            ),
        )
        self.offload, self.zeroing = self.rig.extra
        self.pools = [
            device.zeros((NUM_BLOCKS, 4, 2), torch.float32),
            device.zeros((NUM_BLOCKS, 4, 2), torch.float32),
            device.zeros((NUM_BLOCKS, 4, 5), torch.float16),
        ]
        self.offload.allocate([self.pools[0], *self.pools])
        self.zeroing.pools = self.pools
        self.fill()

    def fill(self, start: int = 0) -> None:
        """Block b of pool p holds start + b + 100 p."""
        for p, pool in enumerate(self.pools):
            for b in range(NUM_BLOCKS):
                self.device.launch(torch.Tensor.fill_, pool[b], start + b + 100 * p)

    def step(self, offloads: PageCopies = NO_COPIES, new_rows: Sequence[Any] = ()) -> None:
        slots = [row.ref.slot for row in new_rows] or [0]
        plan = plan_of([(s, 1, 0, False, 0) for s in slots], new_rows=new_rows)
        plan.offloads = offloads
        participants: list[StepParticipant] = [self.offload, self.zeroing]
        self.offload.begin_step(plan)
        for participant in participants:
            for row in plan.new_rows:
                participant.add_request(row)
            participant.apply_writes()
        batch, staged = self.rig.start(plan)
        for participant in participants:
            participant.before_forward(batch)
        staged.release()

    def blocks(self) -> list[list[float]]:
        """Per pool what each block holds."""
        found = []
        for pool in self.pools:
            values = self.rig.read(pool).reshape(NUM_BLOCKS, -1)
            assert (values == values[:, :1]).all(), "a block moves whole"
            found.append(values[:, 0].tolist())
        return found


def copies(blocks: list[int], pages: list[int]) -> PageCopies:
    return PageCopies.of(blocks, pages)


def restored(slot: int, blocks: list[int], from_blocks: list[int], pages: list[int]) -> Any:
    """A new row over `blocks`, all of whose tokens but the last are computed."""
    row = new_row(slot, range(4 * len(blocks)), [blocks], num_computed=4 * len(blocks) - 1)
    row.restores = copies(from_blocks, pages)
    return row


@pytest.fixture(params=["cpu", "fake"])
def moved(request, monkeypatch):
    """With a buffer for 3 pages of float32: copies come in pieces."""
    monkeypatch.setattr(offload, "_BUFFER_BYTES", 3 * 4 * 2 * 4)
    return Moved({"cpu": lambda: CPUDevice(1), "fake": FakeDevice}[request.param]())


def test_out_and_back(moved):
    moved.step(copies([5, 6, 9, 2, 11], [0, 1, 2, 7, 3]))
    moved.fill(1000)
    moved.step(
        new_rows=[restored(1, [20, 21, 3, 4], [21, 3, 4], [7, 1, 3]), restored(2, [8], [8], [2])]
    )
    for p, held in enumerate(moved.blocks()):
        expected = [1000.0 + b + 100 * p for b in range(NUM_BLOCKS)]
        for block, source in ((21, 2), (3, 6), (4, 11), (8, 9)):
            expected[block] = source + 100.0 * p
        assert held == expected


def test_saved_before_the_next_owner_writes(moved):
    """In one step block 5 is saved and restored with block 6's bytes, and 6 is saved and zeroed."""
    moved.step(copies([6], [4]))
    row = restored(1, [5], [5], [4])
    fresh = new_row(2, range(4), [[6]])
    moved.step(copies([5, 6], [0, 1]), [row, fresh])
    first = moved.blocks()[0]
    assert (first[5], first[6]) == (6.0, 0.0)
    moved.step(new_rows=[restored(3, [15, 16], [15, 16], [0, 1])])
    assert moved.blocks()[0][15:17] == [5.0, 6.0]


def reuse_a_page(device: Any) -> list[float]:
    """Page 0 has three owners, one after the other, and nobody waits in between: what each of them
    got back."""
    moved = Moved(device)
    got = torch.zeros(3)
    for owner in (1, 2, 3):
        moved.step(copies([owner], [0]))
        moved.fill(owner * 1000)
        moved.step(new_rows=[restored(owner, [10], [10], [0])])
        device.launch(torch.Tensor.copy_, got[owner - 1], moved.pools[0][10, 0, 0])
    device.synchronize()
    return got.tolist()


def test_a_page_is_used_again_without_waiting():
    """Case 1, of pages: the device runs nothing until the end."""
    moved = Moved(FakeDevice())
    before = moved.device.num_done
    moved.step(copies([1], [0]))
    assert moved.device.num_done == before
    for device in (FakeDevice(), CPUDevice(1)):
        assert reuse_a_page(device) == [1.0, 1002.0, 2003.0]


@pytest.mark.parametrize("copy", ["copy_to_host", "copy_to_device"])
def test_a_copy_beside_the_queue_is_found(monkeypatch, copy):
    """So the test above can fail: a copy that does not wait for its turn."""

    def at_once(self: FakeDevice, target: torch.Tensor, source: torch.Tensor) -> None:
        if source.dtype is torch.int32:  # staging is not what is broken
            self.launch(torch.Tensor.copy_, target, source)
            return
        with torch._C.DisableTorchFunctionSubclass():
            target.copy_(source)

    monkeypatch.setattr(FakeDevice, copy, at_once)
    assert reuse_a_page(FakeDevice()) != [1.0, 1002.0, 2003.0]


def test_pages_are_poisoned_on_a_device_that_poisons():
    moved = Moved(FakeDevice())
    moved.step(new_rows=[restored(1, [8], [8], [5])])
    with pytest.raises(AssertionError):
        moved.blocks()  # NaN is not equal to itself


def test_a_failed_step_leaves_nothing_for_the_next_one(moved):
    plan = plan_of([(1, 1, 0, False, 0)])
    plan.offloads = copies([5], [0])
    moved.offload.begin_step(plan)
    moved.offload.add_request(restored(1, [8], [8], [0]))
    moved.step()
    assert moved.blocks()[0] == [float(b) for b in range(NUM_BLOCKS)]


def test_what_it_measures(moved):
    moved.device.launch(torch.Tensor.zero_, moved.pools[0][0])
    before = moved.blocks()
    per_page, per_move = moved.offload.measure()
    assert 0 <= per_page < 1
    assert 0 <= per_move < 1
    assert per_page + per_move > 0
    assert moved.blocks() == before


def test_without_pages_no_memory_is_taken():
    device = CPUDevice(1)
    rig = BatchRig(device, declare=lambda rig: KVOffload(rig.device, rig.staging, 0))
    rig.extra.allocate([torch.zeros(4, 4)])
    assert rig.extra._stores == []
