from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import StagedWriteArgs


def staged_write(arena: torch.Tensor, writes: torch.Tensor, num_writes: int) -> None:
    args = StagedWriteArgs(arena=arena.data_ptr(), writes=writes.data_ptr(), num_writes=num_writes)
    call(loaded().functions.pelton_staged_write, args)
