from __future__ import annotations

import torch


def staged_write(arena: torch.Tensor, writes: torch.Tensor, num_writes: int) -> None:
    targets = writes[:num_writes]
    cu_lens = writes[num_writes : 2 * num_writes + 1]
    contents = writes[2 * num_writes + 1 :]
    word = torch.arange(len(contents), dtype=torch.int32, device=arena.device)
    owner = torch.searchsorted(cu_lens[1:], word, right=True)
    arena.index_copy_(0, (targets - cu_lens[:-1])[owner].add_(word).long(), contents)
