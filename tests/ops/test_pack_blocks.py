from __future__ import annotations

import pytest
import torch

from pelton.ops.pack_blocks import pack_blocks, unpack_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_ids", [[], [3], [6, 1, 2], [0, 1, 2, 3, 4, 5, 6]])
def test_there_and_back(block_ids, dtype):
    """Bit for bit, NaN and all; no other block is touched."""
    pool = torch.randn(7, 5, 2, 3).mul(50).to(dtype)
    if dtype.is_floating_point:
        pool[:, 4] = torch.nan
    ids = torch.tensor(block_ids, dtype=torch.int32)
    packed = torch.full((len(block_ids), 5, 2, 3), 1, dtype=dtype)
    pack_blocks(pool, ids, packed)
    assert packed.view(torch.uint8).equal(pool[block_ids].view(torch.uint8))

    other = torch.full_like(pool, 9)
    unpack_blocks(other, ids, packed)
    expected = torch.full_like(pool, 9)
    expected[block_ids] = pool[block_ids]
    assert other.view(torch.uint8).equal(expected.view(torch.uint8))
