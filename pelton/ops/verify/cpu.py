from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import VerifyArgs
from pelton.ops.step_tensors import StepArrays


def verify(
    step: StepArrays,
    fields: torch.Tensor,
    token_ids: torch.Tensor,
    status: torch.Tensor,
    out: torch.Tensor,
) -> None:
    args = VerifyArgs(
        cu_num_logits=step.cu_num_logits.data_ptr(),
        idx_mapping=step.idx_mapping.data_ptr(),
        fields=fields.data_ptr(),
        token_ids=token_ids.data_ptr(),
        status=status.data_ptr(),
        out=out.data_ptr(),
        fields_stride=fields.stride(0),
        out_stride=out.stride(0),
        num_rows=len(out),
        num_columns=out.shape[1] - 2,
        num_logits=len(token_ids),
    )
    call(loaded().functions.pelton_verify, args)
