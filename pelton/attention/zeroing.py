"""For kernels that read whole blocks: a block is zeroed when a row gets it.

Such a kernel multiplies what lies past a sequence's end by a weight of 0, and 0 * NaN is NaN: the
bytes that a block's former owner left must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pelton.batch.input_batch import InputBatch
from pelton.batch.participant import StepParticipant
from pelton.batch.staged import Staging
from pelton.core.plan import BlockAppend, Int32Array, NewRow
from pelton.device.protocol import Device
from pelton.ops.step_kernels import step_kernel


class NewBlockZeroing(StepParticipant):
    """Zeroes a step's new blocks in all pools, before anything is stored in them.

    Args:
        block_sizes: per KV group, in tokens.
    """

    def __init__(
        self, device: Device, staging: Staging, num_blocks: int, block_sizes: Sequence[int]
    ) -> None:
        self._device = device
        self._zero_blocks = step_kernel("zero_blocks", device.torch_device.type)
        self._block_sizes = tuple(block_sizes)
        self._list = staging.tensor("new_blocks", 1, num_blocks, torch.int32)
        self._new: list[Int32Array] = []
        self._count = 0
        self.pools: Sequence[torch.Tensor] = ()

    def add_request(self, row: NewRow) -> None:
        for blocks, block_size in zip(row.block_ids, self._block_sizes, strict=True):
            # A block that is computed in part comes whole from where it was saved.
            self._new.append(blocks[-(-row.num_computed_tokens // block_size) :])

    def append_blocks(self, append: BlockAppend) -> None:
        self._new.append(append.block_ids)

    def apply_writes(self) -> None:
        self._count = sum(map(len, self._new))
        if self._count:
            self._list.stage(0, 0, np.concatenate(self._new))
        self._new = []

    def before_forward(self, batch: InputBatch) -> None:
        if self._count:
            self._device.launch(self._zero_blocks, self.pools, self._list.tensor[0, : self._count])
