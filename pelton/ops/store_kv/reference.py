from __future__ import annotations

import torch


def store_kv(kv: torch.Tensor, pool: torch.Tensor, kv_slots: torch.Tensor) -> None:
    pool.index_copy_(0, kv_slots, kv)
