"""A head whose vocabulary is cut over the ranks: every rank gets all logits, and draws alike."""

from __future__ import annotations

import torch

from pelton.layers.context import Communicator
from pelton.models.protocol import Model
from pelton.ops import lm_head_sample
from pelton.ops.lm_head_sample import DrawRows, HeadSignature
from pelton.ops.registry import bind

_FROM_LOGITS = ("drawn", "composed")


class GatheredHead:
    """Model.head and Model.draw over the whole vocabulary.

    Noise is made of a request's seed and a token's place, and gathered logits are the same bits on
    every rank, so that no rank need be told what another one has drawn.
    """

    def __init__(
        self, model: Model, communicator: Communicator, dtype: torch.dtype, device_type: str
    ) -> None:
        self._model = model
        self._communicator = communicator
        self.vocab_shard_size = model.config.vocab_size
        none = torch.empty(0)
        self._draw = bind(
            "lm_head_sample",
            [one for one in lm_head_sample.CANDIDATES if one.name in _FROM_LOGITS],
            HeadSignature(
                hidden_size=model.config.hidden_size,
                vocab_size=model.config.vocab_size,
                dtype=dtype,
                device_type=device_type,
                norm_eps=model.config.rms_norm_eps,
            ),
            head=self.head,
            weight=none,
            norm_weight=none,
        )

    def head(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden: [N, H] -> out: [N, V]."""
        shard = out.new_empty(len(hidden), self._model.vocab_shard_size)
        self._model.head(hidden, shard)
        shards = out.new_empty(self._communicator.size, *shard.shape)
        self._communicator.all_gather(shards, shard)
        # Only the last ranks' shards may end in padding.
        out.copy_(shards.transpose(0, 1).flatten(1)[:, : out.shape[1]])

    def draw(
        self,
        hidden: torch.Tensor,
        indices: torch.Tensor,
        rows: DrawRows,
        logits: torch.Tensor,
        out_ids: torch.Tensor,
        out_status: torch.Tensor,
    ) -> None:
        self._draw(len(indices), hidden, indices, rows, logits, out_ids, out_status)
