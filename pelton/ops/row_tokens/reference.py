from __future__ import annotations

import torch

from pelton.ops.step_tensors import NEXT_TOKENS, TOTAL_LEN


def row_tokens(
    fields: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
) -> None:
    rows = slots[:, None]
    first_draft = NEXT_TOKENS + 1
    num_drafts = fields.shape[1] - first_draft
    draft = index - fields[:, TOTAL_LEN].index_select(0, slots)[:, None]
    known = tokens[rows, index.clamp(0, tokens.shape[1] - 1).long()]
    out.copy_(torch.where((index >= 0) & (draft < 0), known, -1))
    if num_drafts:
        drafted = fields[rows, (first_draft + draft.clamp(0, num_drafts - 1)).long()]
        out.copy_(torch.where((draft >= 0) & (draft < num_drafts), drafted, out))
