from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import TakeRowsArgs


def take_rows(table: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    size = table.element_size()
    args = TakeRowsArgs(
        table=table.data_ptr(),
        index=index.data_ptr(),
        out=out.data_ptr(),
        row_bytes=table.shape[1] * size,
        table_stride=table.stride(0) * size,
        out_stride=out.stride(0) * size,
        num_rows=len(index),
        index_is_int64=index.dtype == torch.int64,
    )
    call(loaded().functions.pelton_take_rows, args)
