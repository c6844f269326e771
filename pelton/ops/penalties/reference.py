from __future__ import annotations

import torch


def penalties(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    prompt_len: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    place = torch.arange(tokens.shape[1], device=tokens.device)
    counts_for = (place < num_tokens[:, None]) & (tokens >= 0) & (tokens < logits.shape[1])
    is_output = counts_for & (place >= prompt_len[:, None])
    ids = torch.where(counts_for, tokens, 0).long()
    # Integers: their sums are the same in every order of addition.
    count = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    seen = count.scatter_add(1, ids, counts_for.to(torch.int32)) > 0
    count.scatter_add_(1, ids, is_output.to(torch.int32))

    factor = repetition[:, None]
    scaled = torch.where(logits > 0, logits / factor, logits * factor)
    logits.copy_(torch.where(seen, scaled, logits))
    logits.sub_(frequency[:, None] * count)
    logits.sub_(presence[:, None] * (count > 0))
