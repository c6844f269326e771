"""Weights in blocks: what comes out is what the gguf library reads."""

from __future__ import annotations

import pytest
import torch
from support.blocks import numbers, random_blocks

from pelton.device.native.forms import FORMS
from pelton.device.native.library import library
from pelton.ops.block_weight import BlockWeight, Run
from pelton.ops.take_block_rows.cpu import bind

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")


def rows_of(weight: BlockWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.full((len(ids), weight.shape[1] + 3), torch.nan, dtype=dtype)
    bind(weight)(ids.int(), wide[:, :-3])
    assert wide[:, -3:].isnan().all()
    return wide[:, :-3]


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_bitwise_those_of_gguf(form):
    for num_rows, num_columns in ((1, 256), (16, 512), (37, 768)):
        blocks = random_blocks(form, num_rows, num_columns)
        expected = numbers(form, blocks)
        assert expected.isfinite().all()
        weight = BlockWeight(num_columns, [Run(form, num_rows)])
        # In pieces, not in order, cut inside a panel.
        for first in (num_rows // 2, 0):
            weight.pack(first, blocks[first : num_rows if first else num_rows // 2 or None])
            if num_rows == 1:
                break
        for ids in (torch.arange(num_rows), torch.tensor([num_rows - 1, 0, num_rows - 1])):
            assert torch.equal(rows_of(weight, ids, torch.float32), expected[ids])
            halves = rows_of(weight, ids, torch.bfloat16)
            assert torch.equal(halves, expected[ids].bfloat16())


def test_runs_of_several_forms():
    runs = [("Q4_K", 32), ("Q6_K", 16), ("Q8_0", 5)]
    parts = [random_blocks(form, rows, 256, seed=rows) for form, rows in runs]
    weight = BlockWeight(256, [Run(form, rows) for form, rows in runs])
    for first, part in zip((0, 32, 48), parts, strict=True):
        weight.pack(first, part)
    expected = torch.cat([numbers(form, p) for (form, _), p in zip(runs, parts, strict=True)])
    assert torch.equal(rows_of(weight, torch.arange(53), torch.float32), expected)
    with pytest.raises(AssertionError, match="two runs"):
        weight.pack(30, parts[1][:4])


@pytest.mark.parametrize("form", FORMS)
def test_a_packed_weight_is_as_large_as_the_file_s(form):
    weight = BlockWeight(2048, [Run(form, 32)])
    assert weight.nbytes <= random_blocks(form, 32, 2048).nbytes * 1.03


def test_subnormal_and_large_scales():
    blocks = random_blocks("Q4_1", 2, 64)
    blocks[0, :4] = torch.tensor([1, 0, 1, 128], dtype=torch.uint8)  # 2^-24 and -2^-24
    blocks[1, :4] = torch.tensor([255, 123, 255, 251], dtype=torch.uint8)  # +- 65504
    weight = BlockWeight(64, [Run("Q4_1", 2)])
    weight.pack(0, blocks)
    assert torch.equal(rows_of(weight, torch.arange(2), torch.float32), numbers("Q4_1", blocks))
