from __future__ import annotations

import torch

from pelton.ops.add_at import add_at


def test_adds_at_ids_and_nowhere_else():
    """Case 26: an id outside the vocabulary must not reach a neighbour's row."""
    logits = torch.randn(4, 10)
    before = logits.clone()
    ids = torch.tensor([[0, 9, -1], [10, 2**31 - 1, 3], [-1, -1, -1], [0, -1, -5]]).int()
    values = torch.tensor([[1.5, -2, torch.nan], [9, 9, 100], [torch.nan, 1, 1], [-1, 7, 7]])
    add_at(logits, ids, values)
    expected = before.clone()
    for row, column, value in ((0, 0, 1.5), (0, 9, -2), (1, 3, 100), (3, 0, -1)):
        expected[row, column] += value
    assert torch.equal(logits, expected)
