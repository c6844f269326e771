from __future__ import annotations

import torch

from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN, RowTensors, StepArrays


def store_drafts(
    rows: RowTensors,
    step: StepArrays,
    num_sampled: torch.Tensor,
    drafts: torch.Tensor,
    vocab_size: int,
    counts: torch.Tensor,
) -> None:
    device = drafts.device
    num_rows, num_drafts = drafts.shape
    slots = step.idx_mapping.long()
    live = torch.arange(num_rows, device=device) < step.live[0]
    fields = rows.fields[slots]
    # The last place of the table holds a token whose successor nobody may ask for.
    room = rows.tokens.shape[1] - 1 - fields[:, TOTAL_LEN]
    room = torch.where(live & (num_sampled > 0), room, 0)
    is_sound = (drafts >= 0) & (drafts < vocab_size)
    is_sound &= torch.arange(num_drafts, device=device) < room[:, None]
    stands = is_sound.int().cumprod(1)
    counts.copy_(stands.sum(1))
    fields[:, NEXT_TOKENS + 1 :] = torch.where(stands > 0, drafts, -1)
    rows.fields.index_copy_(0, torch.where(live, slots, len(rows.fields) - 1), fields)
