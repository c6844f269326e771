from __future__ import annotations

import torch

from pelton.ops.step_tensors import NEXT_TOKENS, StepArrays


def verify(
    step: StepArrays,
    fields: torch.Tensor,
    token_ids: torch.Tensor,
    status: torch.Tensor,
    out: torch.Tensor,
) -> None:
    out.zero_()
    if len(token_ids) == 0:
        return
    num_columns = out.shape[1] - 2
    first = step.cu_num_logits[:-1, None]
    count = step.cu_num_logits.diff()[:, None]
    column = torch.arange(num_columns, dtype=torch.int32, device=out.device)
    is_row = column < count
    # Columns past a row's verification rows repeat its last one, and are cut below.
    index = (first + torch.minimum(column, count - 1)).clamp_(0, len(token_ids) - 1).long()
    drawn = token_ids[index]
    drafts = fields[step.idx_mapping.long(), NEXT_TOKENS + 1 :]
    stands = (drawn[:, :-1] == drafts) & is_row[:, 1:]
    kept = is_row[:, 0] + stands.int().cumprod(1).sum(1)
    is_kept = column < kept[:, None]
    torch.mul(drawn, is_kept, out=out[:, :num_columns])
    out[:, num_columns] = kept
    unsound = (status[index] * is_kept).to(torch.int32)
    where = (unsound != 0).int().argmax(1, keepdim=True)
    out[:, num_columns + 1] = unsound.gather(1, where)[:, 0]
