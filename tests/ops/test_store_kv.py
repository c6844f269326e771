from __future__ import annotations

import pytest
import torch

from pelton.ops.store_kv import store_kv
from pelton.ops.zero_blocks import zero_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17])
def test_tokens_land_in_their_slots_and_nowhere_else(num_tokens, dtype):
    torch.manual_seed(0)
    pool = torch.full((40, 12), torch.nan, dtype=dtype)
    qkv = torch.randn(num_tokens, 20).to(dtype)
    slots = torch.randperm(39)[:num_tokens] + 1
    store_kv(qkv[:, 8:], pool, slots)
    assert torch.equal(pool[slots], qkv[:, 8:])
    others = torch.ones(40, dtype=torch.bool)
    others[slots] = False
    assert pool[others].isnan().all()


def test_padding_tokens_share_the_null_block():
    """Case 7: many tokens with slot 0 change slot 0 alone."""
    pool = torch.zeros(8, 2)
    store_kv(torch.arange(1.0, 11.0).view(5, 2), pool, torch.tensor([6, 0, 0, 4, 0]))
    assert pool[6].tolist() == [1.0, 2.0]
    assert pool[4].tolist() == [7.0, 8.0]
    assert (pool[[1, 2, 3, 5, 7]] == 0).all()


@pytest.mark.parametrize("ids", [[], [3], [1, 4, 2]])
def test_zero_blocks(ids):
    pools = [torch.full((5, 4, 2), torch.nan), torch.full((5, 8), 7, dtype=torch.int8)]
    before = [pool.clone() for pool in pools]
    zero_blocks(pools, torch.tensor(ids, dtype=torch.int32))
    for pool, old in zip(pools, before):
        for block in range(5):
            if block in ids:
                assert (pool[block] == 0).all()
            else:
                assert torch.equal(pool[block].nan_to_num(), old[block].nan_to_num())
                assert torch.equal(pool[block].isnan(), old[block].isnan())
