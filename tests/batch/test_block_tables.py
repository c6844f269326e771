from __future__ import annotations

import numpy as np
import pytest
from support.batch import BatchRig, new_row

from pelton.core.plan import BlockAppend, SlotRef
from pelton.device.fake import FakeDevice
from pelton.errors import IntegrityError


def append(slot: int, group: int, first: int, ids: list[int]) -> BlockAppend:
    return BlockAppend(
        ref=SlotRef(slot, 1), group=group, first=first, block_ids=np.array(ids, np.int32)
    )


def test_each_group_has_its_own_table_and_appends_go_behind():
    rig = BatchRig(FakeDevice(), max_num_seqs=2, max_model_len=18, block_sizes=(4, 8))
    assert [tuple(table.shape) for table in rig.tables.tensors] == [(3, 5), (3, 3)]
    step = rig.staging.begin()
    rig.tables.add(new_row(1, [1], [[5, 6], [7]]))
    rig.tables.append(append(1, 0, 2, [8, 9]))
    rig.tables.append(append(1, 1, 1, [3]))
    rig.tables.append(append(0, 1, 2, [4]))
    rig.staging.flush_writes(step)
    step.release()
    small, large = (rig.read(table).tolist() for table in rig.tables.tensors)
    assert small == [[0] * 5, [5, 6, 8, 9, 0], [0] * 5]
    assert large == [[0, 0, 4], [7, 3, 0], [0] * 3]


def test_a_block_past_the_table_is_refused():
    rig = BatchRig(FakeDevice(), max_model_len=16)
    with pytest.raises(IntegrityError, match="block_table_0"):
        rig.tables.append(append(0, 0, 4, [1]))
    with pytest.raises(ValueError):
        rig.tables.add(new_row(0, [1], [[1], [2]]))
