"""What a plan says of recurrent state, on a device that is as late as it may be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.batch import BatchRig, new_row, plan_of

from pelton.attention.zeroing import NewBlockZeroing
from pelton.batch.recurrent_states import RecurrentStates
from pelton.batch.state_checkpoints import StateCheckpoints
from pelton.core.kv.groups import group_layers
from pelton.core.kv.spec import LayerKV, RecurrentSpec
from pelton.core.plan import SlotRef, StateSave
from pelton.device.fake import FakeDevice

NUM_BLOCKS = 20
STATE = RecurrentSpec(
    ssm_shape=(3, 7), ssm_dtype="float32", conv_shape=(2, 5), conv_dtype="bfloat16"
)


def layer(index: int, **changes: Any) -> LayerKV:
    given = {"num_kv_heads": 1, "head_dim": 2, "block_size": 4, "page_bytes": 64}
    return LayerKV(index=index, dtype="float32", **{**given, **changes})


LAYERS = [layer(0, kind="recurrent", recurrent=STATE), layer(1)]
LAYERS += [layer(i, kind="recurrent", recurrent=STATE) for i in (2, 3)]
PAGES = group_layers(LAYERS, 8)[-1].pages


class Rig:
    """Checkpoints and zeroing around a forward pass that does nothing."""

    def __init__(self, num_drafts: int) -> None:
        self.device = FakeDevice()
        self.rig = BatchRig(self.device, num_drafts=num_drafts, declare=self._declare)
        self.states = RecurrentStates(
            self.device, LAYERS, num_rows=self.rig.rows.num_rows, num_drafts=num_drafts
        )
        self.pool = self.device.empty((NUM_BLOCKS, 4, 2, 1, 2), torch.float32)
        self.zeroing.pools = [self.pool]
        self.checkpoints.connect(LAYERS, [torch.empty(0), self.pool], self.states)

    def _declare(self, rig: BatchRig) -> None:
        self.checkpoints = StateCheckpoints(
            rig.device, rig.staging, max_num_seqs=rig.max_num_seqs, pages=PAGES
        )
        self.zeroing = NewBlockZeroing(rig.device, rig.staging, NUM_BLOCKS, rig.block_sizes)

    def fill(self, slot: int, value: int) -> None:
        """All of a row's ring: at index i of layer l the bytes are value + i + 10 * l."""
        for index in (0, 2, 3):
            raw = self.states.tensors(index).raw
            for i in range(raw.shape[1]):
                self.device.launch(torch.Tensor.fill_, raw[slot, i], value + i + 10 * index)

    def step(self, new_rows: Any = (), saves: Any = ()) -> None:
        slots = [row.ref.slot for row in new_rows] or [save.ref.slot for save in saves]
        plan = plan_of([(slot, 1, 0, False, 0) for slot in slots], new_rows=new_rows)
        plan.state_saves = list(saves)
        self.checkpoints.begin_step(plan)
        for row in new_rows:
            self.checkpoints.add_request(row)
            self.zeroing.add_request(row)
        self.checkpoints.apply_writes()
        self.zeroing.apply_writes()
        batch, staged = self.rig.start(plan)
        self.checkpoints.before_forward(batch)
        self.zeroing.before_forward(batch)
        self.checkpoints.after_forward(batch)
        staged.release()

    def state(self, slot: int) -> list[list[int]]:
        """Per layer the first byte of each index of the row's ring."""
        found = []
        for index in (0, 2, 3):
            raw = self.rig.read(self.states.tensors(index).raw[slot])
            assert (raw == raw[:, :1]).all(), "a state is copied whole"
            found.append(raw[:, 0].tolist())
        return found


def save(slot: int, length: int, blocks: Any) -> StateSave:
    return StateSave(ref=SlotRef(slot, 1), length=length, block_ids=np.array(blocks, np.int32))


def row(slot: int, length: int, table: Any, state_blocks: Any) -> Any:
    made = new_row(slot, range(length + 1), [table], num_computed=length)
    made.state_blocks = np.array(state_blocks, np.int32)
    return made


def test_pages_of_three_states():
    """Two of 112 bytes and one more take six pages of 64."""
    assert STATE.state_bytes == 112
    assert PAGES == 6


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_from_row_to_row(num_drafts):
    """The state after 8 tokens stands where position 7 has it, in rings of either length."""
    rig = Rig(num_drafts)
    rig.fill(1, 100)
    rig.fill(4, 7)
    blocks = [5, 2, 9, 3, 8, 4]
    rig.step(saves=[save(1, 8, blocks)])
    rig.fill(1, 50)
    rig.step(new_rows=[row(4, 8, [10, 11, 12], blocks)])
    size, index = 1 + num_drafts, 7 % (1 + num_drafts)
    for number, found in zip((0, 2, 3), rig.state(4)):
        expected = [7 + i + 10 * number for i in range(size)]
        expected[index] = 100 + index + 10 * number
        assert found == expected


def test_blocks_that_are_read_may_be_given_away_in_the_same_step():
    """They are zeroed for their next owner after the row has its state; and what was read may be
    saved to in the same step."""
    rig = Rig(0)
    rig.fill(1, 100)
    rig.fill(2, 30)
    first, second = [5, 2, 9, 3, 8, 4], [10, 11, 12, 13, 14, 15]
    rig.step(saves=[save(1, 8, first), save(2, 8, second)])
    rig.step(
        new_rows=[row(3, 8, [1, 6, first[0]], second), row(4, 8, [16, 17, second[3]], first)],
        saves=[save(3, 8, [1, *first[1:]])],
    )
    rig.fill(1, 60)
    assert rig.state(3) == [[30], [50], [60]]
    assert rig.state(4) == [[100], [120], [130]]
    rig.step(new_rows=[row(0, 8, [16, 17, 18], [1, *first[1:]])])
    assert rig.state(0) == [[30], [50], [60]]


def test_a_step_that_failed_leaves_no_command():
    rig = Rig(0)
    rig.fill(1, 100)
    rig.fill(2, 30)
    rig.step(saves=[save(1, 8, range(1, 7))])
    rig.checkpoints.begin_step(plan_of([]))
    rig.checkpoints.add_request(row(2, 8, [7, 8, 9], range(1, 7)))
    rig.step(new_rows=[row(3, 0, [7], [])])
    assert rig.state(2) == [[30], [50], [60]]


def test_a_hit_without_state_is_a_fault():
    rig = Rig(0)
    with pytest.raises(AssertionError, match="without its state"):
        rig.checkpoints.add_request(row(3, 8, [1, 2, 3], []))
