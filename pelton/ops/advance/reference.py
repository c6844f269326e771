from __future__ import annotations

import torch

from pelton.ops.step_tensors import NEXT_TOKENS, NUM_COMPUTED, TOTAL_LEN, RowTensors, StepArrays


def advance(
    rows: RowTensors, step: StepArrays, sampled: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    num_rows = len(step.idx_mapping)
    slots = step.idx_mapping.long()
    reserved = len(rows.fields) - 1
    live = torch.arange(num_rows, device=slots.device) < step.live[0]
    kept = num_sampled * live
    query_len = step.query_start_loc.diff() * live
    num_logits = step.cu_num_logits.diff() * live

    fields = rows.fields[slots]
    total_len = fields[:, TOTAL_LEN]
    for column in range(sampled.shape[1]):
        at = total_len + column
        is_kept = (kept > column) & (at < rows.tokens.shape[1])
        # Dropped tokens go to the reserved row, which nobody reads.
        rows.tokens.index_put_(
            (
                torch.where(is_kept, slots, reserved),
                torch.where(is_kept, at, 0).long(),
            ),
            sampled[:, column],
        )
    fields[:, TOTAL_LEN] += kept
    fields[:, NUM_COMPUTED] += query_len - (num_logits - num_sampled) * (num_logits > 0)
    newest = sampled.gather(1, (kept - 1).clamp_(min=0).long()[:, None])[:, 0]
    fields[:, NEXT_TOKENS] = torch.where(kept > 0, newest, fields[:, NEXT_TOKENS])
    rows.fields.index_copy_(0, torch.where(live, slots, reserved), fields)
