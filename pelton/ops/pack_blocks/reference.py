from __future__ import annotations

import torch


def pack_blocks(pool: torch.Tensor, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    torch.index_select(pool, 0, block_ids, out=packed)


def unpack_blocks(pool: torch.Tensor, block_ids: torch.Tensor, packed: torch.Tensor) -> None:
    pool.index_copy_(0, block_ids.long(), packed)
