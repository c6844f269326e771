from __future__ import annotations

import torch


def add_rows(x: torch.Tensor, total: torch.Tensor) -> None:
    # On a CPU it goes through the rows one after the other; `sum` would build a tree over them.
    nowhere_else = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    total[None].index_add_(0, nowhere_else, x)
