from __future__ import annotations

import numpy as np
import pytest
import torch

from pelton.ops.row_tokens import row_tokens
from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_against_lists(num_drafts):
    """Known tokens, then drafts, then nothing; what a former owner left in the table is nothing."""
    rng = np.random.default_rng(num_drafts)
    table = torch.tensor(rng.integers(0, 50, (5, 9)), dtype=torch.int32)
    fields = torch.full((5, NEXT_TOKENS + 1 + num_drafts), 7, dtype=torch.int32)
    total = [1, 9, 4, 0, 8]
    drafts = rng.integers(50, 99, (5, num_drafts))
    fields[:, TOTAL_LEN] = torch.tensor(total)
    fields[:, NEXT_TOKENS + 1 :] = torch.tensor(drafts)
    slots = torch.tensor([4, 1, 1, 0, 2, 3])
    index = torch.tensor(rng.integers(-2, 14, (6, 40)), dtype=torch.int32)
    out = torch.empty(6, 40, dtype=torch.int32)
    row_tokens(fields, table, slots, index, out)
    for row, slot in enumerate(slots.tolist()):
        tokens = [*table[slot, : total[slot]].tolist(), *drafts[slot]]
        expected = [tokens[i] if 0 <= i < len(tokens) else -1 for i in index[row].tolist()]
        assert out[row].tolist() == expected
