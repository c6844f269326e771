from __future__ import annotations

import pytest
from support.batch import BatchRig, new_row

from pelton.device.fake import FakeDevice
from pelton.errors import IntegrityError


def add(rig: BatchRig, *rows) -> None:
    step = rig.staging.begin()
    for row in rows:
        rig.rows.add(row)
    rig.staging.flush_writes(step)
    step.release()


def test_a_row_is_written_whole_whatever_was_there():
    rig = BatchRig(FakeDevice(), max_num_seqs=2, max_model_len=8, num_drafts=2)
    add(rig, new_row(1, [1, 2, 3, 4, 5, 6, 7], [[]], prompt_len=3, num_computed=4))
    fields, tokens = rig.row_tensors.fields, rig.row_tensors.tokens
    assert rig.read(fields).tolist() == [[0] * 7, [3, 7, 7, 4, 7, -1, -1], [0] * 7]
    assert rig.read(tokens)[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    # Drafts and counters of the former owner are gone; prompt and prefill lengths differ.
    add(rig, new_row(1, [9, 8], [[]], prompt_len=1))
    assert rig.read(fields)[1].tolist() == [1, 2, 2, 0, 8, -1, -1]
    assert rig.read(tokens)[1, :2].tolist() == [9, 8]
    assert rig.rows.prefill_len_np.tolist() == [0, 2, 0]


def test_the_reserved_row_is_one_more_and_the_last():
    rig = BatchRig(FakeDevice(), max_num_seqs=3, max_model_len=8)
    assert (rig.rows.num_rows, rig.rows.reserved_slot) == (4, 3)
    assert rig.row_tensors.fields.shape == (4, 5)
    assert rig.row_tensors.tokens.shape == (4, 8)
    add(rig, new_row(3, [1], [[]]))


def test_more_tokens_than_the_row_holds_are_refused():
    rig = BatchRig(FakeDevice(), max_model_len=8)
    with pytest.raises(IntegrityError, match="row_tokens"):
        rig.rows.add(new_row(0, range(9), [[]]))
