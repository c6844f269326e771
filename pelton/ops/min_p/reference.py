from __future__ import annotations

import torch


def min_p(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    lowest = logits.amax(-1) + threshold.log()
    keeps = (logits >= lowest[:, None]).to(logits.dtype)
    # 1 / keeps - 1 is 0 or inf: on a CPU several times quicker than masked_fill or where.
    logits.sub_(keeps.reciprocal_().sub_(1.0))
