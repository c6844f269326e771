"""Where the sampler's logits come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class LogitsSource(Protocol):
    """Asked for by the sampler, rather than logits, so that a fused or sharded head fits."""

    def logits(self) -> torch.Tensor:
        """[N, V] in the head's dtype, one row per verification row; runs inside a launch."""
        ...


@dataclass(frozen=True, slots=True)
class HeadLogits:
    """The whole head on this rank.

    hidden: [T, H]; indices: [N] int64, the rows to sample; head(rows [N, H], out [N, V]);
    out: [N, V] memory for the logits.
    """

    hidden: torch.Tensor
    indices: torch.Tensor
    head: Callable[[torch.Tensor, torch.Tensor], None]
    out: torch.Tensor

    def logits(self) -> torch.Tensor:
        self.head(self.hidden.index_select(0, self.indices), self.out)
        return self.out
