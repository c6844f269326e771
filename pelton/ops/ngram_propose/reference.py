from __future__ import annotations

import torch

from pelton.ops.step_tensors import TOTAL_LEN, RowTensors, StepArrays


def ngram_propose(
    rows: RowTensors, step: StepArrays, drafts: torch.Tensor, min_n: int, max_n: int, width: int
) -> None:
    device = drafts.device
    slots = step.idx_mapping.long()
    tokens = rows.tokens[:, :width][slots]
    total_len = rows.fields[slots, TOTAL_LEN].clamp(1, width).long()
    last = total_len[:, None] - 1

    # same[b, p]: whether the j + 1 tokens that end at p equal the last j + 1; length: how many do.
    place = torch.arange(width, device=device)
    same = (tokens == tokens.gather(1, last)) & (place < last)
    length = same.to(torch.int32)
    for j in range(1, min(max_n, width)):
        same[:, :j] = False
        same[:, j:] &= tokens[:, :-j] == tokens.gather(1, (last - j).clamp_(min=0))
        length += same
    score, best = (length * width + place).max(1, keepdim=True)
    is_found = score >= min_n * width

    period = (last - best).clamp_(min=1)
    ahead = torch.arange(drafts.shape[1], device=device) % period
    found = tokens.gather(1, (total_len[:, None] - period + ahead).clamp_(0, width - 1))
    drafts.copy_(torch.where(is_found, found, -1))
