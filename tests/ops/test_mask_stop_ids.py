from __future__ import annotations

import pytest
import torch

from pelton.ops.mask_stop_ids import mask_stop_ids


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_masks_active_rows_and_nothing_else():
    """Case 26: an id outside the vocabulary must not reach a neighbour's row."""
    logits = torch.randn(4, 10)
    before = logits.clone()
    stop_ids = torch.tensor([[0, 9, -1], [10, 2**31 - 1, 3], [1, 2, 3], [-1, -1, -1]]).int()
    mask_stop_ids(logits, stop_ids, torch.tensor([True, True, False, True]))
    expected = before.clone()
    expected[0, [0, 9]] = -torch.inf
    expected[1, 3] = -torch.inf
    assert (logits == expected).all()
