"""Where the sampler's logits come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pelton.models.protocol import Model
from pelton.ops.lm_head_sample import DrawRows


class LogitsSource(Protocol):
    """Asked for by the sampler, rather than logits, so that a fused or sharded head fits."""

    def logits(self) -> torch.Tensor:
        """[N, V] in the head's dtype, one row per verification row; runs inside a launch."""
        ...

    def draw(self, rows: DrawRows, out_ids: torch.Tensor, out_status: torch.Tensor) -> None:
        """A token for each verification row, as ops/lm_head_sample says; runs inside a launch."""
        ...


@dataclass(frozen=True, slots=True)
class HeadLogits:
    """The whole head on this rank.

    hidden: [T, H]; indices: [N] int64, the rows to sample; out: [N, V] memory for the logits.
    """

    hidden: torch.Tensor
    indices: torch.Tensor
    model: Model
    out: torch.Tensor

    def logits(self) -> torch.Tensor:
        self.model.head(self.hidden.index_select(0, self.indices), self.out)
        return self.out

    def draw(self, rows: DrawRows, out_ids: torch.Tensor, out_status: torch.Tensor) -> None:
        self.model.draw(self.hidden, self.indices, rows, self.out, out_ids, out_status)
