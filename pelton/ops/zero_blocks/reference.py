from __future__ import annotations

from collections.abc import Sequence

import torch


def zero_blocks(pools: Sequence[torch.Tensor], block_ids: torch.Tensor) -> None:
    index = block_ids.long()
    for pool in pools:
        pool.index_fill_(0, index, 0)
