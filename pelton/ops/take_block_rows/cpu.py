from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.ops.block_weight import BlockWeight
from pelton.ops.native_product import DTYPES
from pelton.ops.registry import Kernel


def bind(weight: BlockWeight) -> Kernel:
    args = weight.arguments()
    run = loaded().functions.pelton_block_rows

    def take_block_rows(ids: torch.Tensor, out: torch.Tensor, _kept: BlockWeight = weight) -> None:
        linear = args.linear
        linear.x, linear.out, linear.num_rows = ids.data_ptr(), out.data_ptr(), len(ids)
        linear.dtype, linear.out_stride = DTYPES[out.dtype], out.stride(0)
        call(run, args)

    return take_block_rows
