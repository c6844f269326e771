from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import LayerNormArgs
from pelton.ops.layer_norm import reference
from pelton.ops.paged_attention import NATIVE_DTYPES


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> None:
    if x.dtype not in NATIVE_DTYPES:
        reference.layer_norm(x, weight, bias, eps, out)
        return
    args = LayerNormArgs(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        num_rows=x.shape[0],
        num_columns=x.shape[1],
        x_stride=x.stride(0),
        out_stride=out.stride(0),
        eps=eps,
        dtype=NATIVE_DTYPES[x.dtype],
    )
    call(loaded().functions.pelton_layer_norm, args)
