"""Where the sampler's logits come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pelton.ops.lm_head_sample import DrawRows


class VocabularyHead(Protocol):
    """Of the whole vocabulary on this rank: the model, if it holds all of it. The verbs are as in
    models/protocol.py. vocab_shard_size: columns of its logits."""

    vocab_shard_size: int

    def head(self, hidden: torch.Tensor, out: torch.Tensor) -> None: ...

    def draw(
        self,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None: ...


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
    """What the head makes of a step's rows.

    hidden: [T, H]; indices: [N] int64, the rows to sample; out: [N, V] memory for the logits.
    """

    hidden: torch.Tensor
    indices: torch.Tensor
    vocabulary: VocabularyHead
    out: torch.Tensor

    def logits(self) -> torch.Tensor:
        self.vocabulary.head(self.hidden.index_select(0, self.indices), self.out)
        return self.out

    def draw(self, rows: DrawRows, out_ids: torch.Tensor, out_status: torch.Tensor) -> None:
        self.vocabulary.draw(self.hidden, self.indices, rows, self.out, out_ids, out_status)
