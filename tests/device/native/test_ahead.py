"""What a product of a tape knows of the next one's weight."""

from __future__ import annotations

import pytest
import torch

from pelton.device.native.ahead import tell_products
from pelton.device.native.library import LinearArgs, library
from pelton.device.native.step_args import TakeRowsArgs
from pelton.ops.block_weight import BlockWeight, Run

pytestmark = pytest.mark.skipif(library() is None, reason="no library of CPU kernels")


def test_each_is_told_the_next_ones_weight_and_the_last_one_nothing():
    block = BlockWeight(64, [Run("Q4_1", 32), Run("Q8_0", 16)])
    first = LinearArgs(weight=4096, dtype=0, num_features=17, num_columns=33)
    blocks = block.arguments()
    blocks.linear.num_columns = 64
    gated = LinearArgs(weight=8192, dtype=1, num_features=64, num_columns=32, activation=1)
    tell_products([first, TakeRowsArgs(), blocks, gated])
    assert (first.ahead, first.ahead_bytes) == (blocks.runs[0].panels, block.nbytes)
    # The two halves of gate and up are read side by side.
    assert (blocks.linear.ahead, blocks.linear.ahead_bytes) == (8192, 64 * 32 * 4 // 2)
    assert (gated.ahead, gated.ahead_bytes) == (None, 0)


def test_columns_and_features_count_as_packed():
    first, second = LinearArgs(), LinearArgs(weight=64, dtype=0, num_features=17, num_columns=33)
    tell_products([first, second])
    assert first.ahead_bytes == 32 * 64 * torch.bfloat16.itemsize
