"""What becomes of proposals."""

from __future__ import annotations

import numpy as np
import torch
from support.batch import BatchRig

from pelton.device.cpu import CPUDevice
from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN, StepArrays
from pelton.ops.store_drafts import store_drafts

VOCAB, LENGTH, K = 100, 32, 3
INT32 = np.iinfo(np.int32)


def store(
    proposals: list[list[int]], total_lens: list[int], num_sampled: list[int], num_live: int
) -> tuple[torch.Tensor, list[int]]:
    """Fields of all rows of state afterwards, and the counts; batch row b is row of state 3 - b,
    and padding is the reserved row."""
    rig = BatchRig(CPUDevice(1), max_num_seqs=4, max_model_len=LENGTH, num_drafts=K)
    rows = rig.row_tensors
    rows.fields.copy_(torch.arange(rows.fields.numel()).view(rows.fields.shape) + 1000)
    slots = [3 - b if b < num_live else 4 for b in range(len(proposals))]
    for slot, total in zip(slots, total_lens):
        rows.fields[slot, TOTAL_LEN] = total
    empty = torch.zeros(len(slots) + 1, dtype=torch.int32)
    step = StepArrays(
        live=torch.tensor([num_live, 0, 0], dtype=torch.int32),
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=empty,
        cu_num_logits=empty,
    )
    counts = torch.full((len(slots),), -7, dtype=torch.int32)
    store_drafts(
        rows,
        step,
        torch.tensor(num_sampled, dtype=torch.int32),
        torch.tensor(proposals, dtype=torch.int32),
        VOCAB,
        counts,
    )
    return rows.fields, counts.tolist()


def test_sound_proposals_are_kept_up_to_the_first_other():
    """An id outside the vocabulary would crash the embedding; what is behind it cannot stand."""
    cases = [
        ([1, 2, 3], [1, 2, 3], 3),
        ([0, VOCAB - 1, 7], [0, VOCAB - 1, 7], 3),
        ([1, -1, 3], [1, -1, -1], 1),
        ([VOCAB, 2, 3], [-1, -1, -1], 0),
        ([1, 2, INT32.max], [1, 2, -1], 2),
        ([INT32.min, 2, 3], [-1, -1, -1], 0),
        ([-7, 2, 3], [-1, -1, -1], 0),
    ]
    for proposal, kept, count in cases:
        fields, counts = store([proposal], [5], [1], 1)
        assert fields[3, NEXT_TOKENS + 1 :].tolist() == kept
        assert counts == [count]


def test_only_drafts_and_only_of_live_rows_change():
    proposals = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [7, 8, 9]]
    fields, counts = store(proposals, [5, 6, 0, 0], [1, 1, 1, 1], 2)
    before = torch.arange(fields.numel()).view(fields.shape) + 1000
    assert fields[3, NEXT_TOKENS + 1 :].tolist() == [1, 2, 3]
    assert fields[2, NEXT_TOKENS + 1 :].tolist() == [4, 5, 6]
    assert counts == [3, 3, 0, 0]
    assert torch.equal(fields[:2], before[:2])
    before[3, TOTAL_LEN], before[2, TOTAL_LEN] = 5, 6
    assert torch.equal(fields[2:4, : NEXT_TOKENS + 1], before[2:4, : NEXT_TOKENS + 1])


def test_a_row_that_did_not_sample_has_none():
    fields, counts = store([[1, 2, 3]], [5], [0], 1)
    assert fields[3, NEXT_TOKENS + 1 :].tolist() == [-1, -1, -1]
    assert counts == [0]


def test_the_end_of_the_context():
    """A draft at the context's last place could only yield a token past it."""
    for total, kept in ((28, 3), (29, 2), (30, 1), (31, 0), (32, 0)):
        fields, counts = store([[1, 2, 3]], [total], [1], 1)
        assert counts == [kept], total
        assert fields[3, NEXT_TOKENS + 1 :].tolist() == [1, 2, 3][:kept] + [-1] * (3 - kept)
