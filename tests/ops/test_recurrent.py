"""Where states are read and written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.recurrent import metadata

from pelton.ops.recurrent import (
    RowGroup,
    each_row_alone,
    read_states,
    row_groups,
    write_states,
)


def groups_of(query_lens: list[int], bounds: list[int]) -> tuple[RowGroup, ...]:
    return row_groups(np.array(query_lens, np.int32), np.array(bounds, np.int32))


def test_rows_of_one_length_go_together():
    assert groups_of([1, 1, 1, 3, 7, 7], [4, 9, 1, 0, 2, 0]) == (
        RowGroup(0, 3, 0, 1, may_be_fresh=False),
        RowGroup(3, 1, 3, 3, may_be_fresh=True),
        RowGroup(4, 2, 6, 7, may_be_fresh=True),
    )
    assert groups_of([2, 1, 0, 0, 2], [0, 5, 0, 0, 5]) == (
        RowGroup(0, 1, 0, 2, may_be_fresh=True),
        RowGroup(1, 1, 2, 1, may_be_fresh=False),
        RowGroup(4, 1, 3, 2, may_be_fresh=False),
    )
    assert groups_of([], []) == ()


def test_a_ring_by_position():
    """Row 2 goes from position 4 to 5 and reads what it left at 3; row 0 begins, at any ring."""
    meta = metadata([(2, 4, 1), (0, 0, 5), (1, 7, 5)], ring=3)
    assert meta.reads[0] == 2 * 3 + 3 % 3
    assert meta.reads[2] == 1 * 3 + 6 % 3
    assert meta.is_fresh.tolist() == [False, True, False]
    assert meta.writes[0, 0] == 2 * 3 + 4 % 3
    assert meta.writes[1].tolist() == [4 % 3, 3 % 3, 2 % 3]
    assert meta.writes[2].tolist() == [3 + 11 % 3, 3 + 10 % 3, 3 + 9 % 3]


def test_a_fresh_row_reads_zeros_whatever_lies_there():
    states = torch.full((2, 3, 4), torch.nan)
    meta = metadata([(1, 0, 2)], ring=3)
    (group,) = meta.groups
    assert torch.equal(read_states(states, meta, group), torch.zeros(1, 4))
    write_states(states, meta, group, 0, torch.ones(1, 4))
    assert torch.equal(states[1, 1], torch.ones(4))
    assert states[0].isnan().all()
    assert states[1, [0, 2]].isnan().all()


@pytest.mark.parametrize("function", [F.silu, F.softplus, torch.exp])
def test_each_row_alone(function):
    """Whole and row by row, over widths that leave a rest to scalar instructions; a step of more
    elements than one thread takes."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for num_rows, width in ((200, 37), (5, 3), (1, 129), (40, 1000), (0, 7)):
            x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)) * 3
            rows = [each_row_alone(function, row[None]) for row in x]
            expected = torch.cat(rows) if rows else x
            assert torch.equal(each_row_alone(function, x), expected)
            assert torch.equal(each_row_alone(function, x[1:]), expected[1:])
    finally:
        torch.set_num_threads(threads)
