from __future__ import annotations

import torch

from pelton.ops.keep_only import keep_only


def test_keeps_the_lists_of_rows_that_have_one():
    """Case 26: ids outside the vocabulary keep nothing, and no list is no mask."""
    logits = torch.randn(4, 10)
    before = logits.clone()
    keep_only(
        logits,
        torch.tensor([[0, 9, -1], [10, 2**31 - 1, 3], [-1, -1, -1], [10, 11, -1]]).int(),
    )
    expected = torch.full((4, 10), -torch.inf)
    expected[0, [0, 9]] = before[0, [0, 9]]
    expected[1, 3] = before[1, 3]
    expected[2] = before[2]
    assert torch.equal(logits, expected)
