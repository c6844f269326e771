from __future__ import annotations

import torch

from pelton.ops.step_tensors import PAD_SLOT, InputTensors, StepArrays


def derive_inputs(
    parent_step: StepArrays,
    parent: InputTensors,
    row_map: torch.Tensor,
    out_step: StepArrays,
    out: InputTensors,
) -> None:
    device = row_map.device
    num_rows = row_map.shape[1]
    parent_row, first, length = row_map.long()
    is_live = torch.arange(num_rows, device=device) < out_step.live[0]
    past_end = parent_step.query_start_loc.diff()[parent_row] - first - length
    torch.mul((parent.seq_lens[parent_row] - past_end).int(), is_live, out=out.seq_lens)

    token = torch.arange(len(out.input_ids), dtype=torch.int32, device=device)
    torch.ge(token, out_step.live[1], out=out.is_padding)
    row = torch.searchsorted(out_step.query_start_loc[1:], token, right=True)
    row.clamp_(max=num_rows - 1)
    source = (parent_step.query_start_loc[parent_row] + first)[row] + (
        token - out_step.query_start_loc[row]
    )
    source = source.masked_fill(out.is_padding, 0).long()
    keep = ~out.is_padding
    torch.mul(parent.input_ids[source], keep, out=out.input_ids)
    torch.mul(parent.positions[:, source], keep, out=out.positions)
    for group, slot_mapping in enumerate(out.slot_mappings):
        slot_mapping.copy_(
            parent.slot_mappings[group][source].masked_fill(out.is_padding, PAD_SLOT)
        )
        batch_table = out.block_tables[group]
        width = batch_table.shape[1]
        torch.mul(parent.block_tables[group][parent_row, :width], is_live[:, None], out=batch_table)
