from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import ZeroBlocksArgs


def zero_blocks(pools: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    """A pool's blocks lie side by side, each in one piece."""
    where = (ctypes.c_void_p * len(pools))(*(pool.data_ptr() for pool in pools))
    sizes = (ctypes.c_int64 * len(pools))(*(pool.stride(0) * pool.element_size() for pool in pools))
    args = ZeroBlocksArgs(
        pools=ctypes.addressof(where),
        block_bytes=ctypes.addressof(sizes),
        block_ids=block_ids.data_ptr(),
        num_pools=len(pools),
        num_blocks=len(block_ids),
    )
    call(loaded().functions.pelton_zero_blocks, args, (where, sizes))
