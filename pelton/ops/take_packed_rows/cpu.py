from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import TakePackedRowsArgs
from pelton.ops.native_product import K_UNIT, packed
from pelton.ops.registry import Kernel


def bind(weight: torch.Tensor) -> Kernel:
    """Of `weight` only the packed copy is kept."""
    own, num_columns = packed(weight), weight.shape[1]
    is_bf16 = weight.dtype == torch.bfloat16
    run = loaded().functions.pelton_take_packed_rows

    def take_packed_rows(ids: torch.Tensor, out: torch.Tensor) -> None:
        args = TakePackedRowsArgs(
            packed=own.data_ptr(),
            index=ids.data_ptr(),
            out=out.data_ptr(),
            num_rows=len(ids),
            num_columns=num_columns,
            columns_pad=-(-num_columns // K_UNIT) * K_UNIT,
            out_stride=out.stride(0),
            is_bf16=is_bf16,
        )
        call(run, args)

    return take_packed_rows
