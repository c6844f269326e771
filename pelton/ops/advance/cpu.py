from __future__ import annotations

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import loaded
from pelton.device.native.step_args import AdvanceArgs
from pelton.ops.step_tensors import RowTensors, StepArrays


def advance(
    rows: RowTensors, step: StepArrays, sampled: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    args = AdvanceArgs(
        fields=rows.fields.data_ptr(),
        tokens=rows.tokens.data_ptr(),
        live=step.live.data_ptr(),
        idx_mapping=step.idx_mapping.data_ptr(),
        query_start_loc=step.query_start_loc.data_ptr(),
        cu_num_logits=step.cu_num_logits.data_ptr(),
        sampled=sampled.data_ptr(),
        num_sampled=num_sampled.data_ptr(),
        fields_stride=rows.fields.stride(0),
        tokens_stride=rows.tokens.stride(0),
        sampled_stride=sampled.stride(0),
        num_sampled_stride=num_sampled.stride(0),
        num_rows=len(step.idx_mapping),
        token_columns=rows.tokens.shape[1],
        num_columns=sampled.shape[1],
    )
    call(loaded().functions.pelton_advance, args)
