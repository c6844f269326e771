from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.batch import BatchRig, new_row

from pelton.config.params import SamplingParams
from pelton.core.request import Request
from pelton.device.cpu import CPUDevice
from pelton.device.fake import FakeDevice
from pelton.errors import IntegrityError
from pelton.messages.to_engine import pack_token_ids, unpack_token_ids


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


def test_a_prompt_stays_an_array_from_the_wire_to_the_staging_block():
    """specs/staging_and_pooling.md 2.10: a list of a million integers costs 20 ms at each hop."""
    ids = unpack_token_ids(pack_token_ids(np.arange(1000, dtype=np.int32)))
    request = Request("r", ids, SamplingParams())
    rig = BatchRig(CPUDevice(1), max_num_seqs=1, max_model_len=1024)
    row = replace(new_row(0, [0], [[1]]), token_ids=request.known_token_ids, prompt_len=1000)
    rig.rows.add(row)
    staged = [words for _, _, words in rig.staging._writes if len(words) == 1000]
    assert len(staged) == 1
    assert np.shares_memory(staged[0], request.known_token_ids)
