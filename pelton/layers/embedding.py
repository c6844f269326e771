"""Token embedding and output head, vocabulary cut over the ranks."""

from __future__ import annotations

from dataclasses import replace

import torch

from pelton.layers.context import BuildContext, Communicator
from pelton.layers.linear import vector
from pelton.layers.parameter import Parameter, vocab_shard
from pelton.ops import norm_linear
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind
from pelton.ops.step_kernels import step_kernel
from pelton.ops.take_block_rows import cpu as take_block_rows
from pelton.ops.take_packed_rows import cpu as take_packed_rows


def vocab_parameter(build: BuildContext, vocab_size: int, hidden_size: int) -> Parameter:
    """[ceil(vocab / size), hidden]; rows past this rank's share are zero."""
    part = vocab_shard((vocab_size, hidden_size), build.rank, build.size)
    tensor = build.weight(-(-vocab_size // build.size), hidden_size)
    tensor[part.dst_size :].zero_()
    return Parameter(tensor, {None: part}, takes_blocks=True)


class Embedding:
    """input_ids [T] int32 -> hidden [T, H]."""

    def __init__(self, build: BuildContext, vocab_size: int, hidden_size: int) -> None:
        self.weight = vocab_parameter(build, vocab_size, hidden_size)
        self._take_rows = step_kernel("take_rows", build.device.type)
        part = self.weight.parts[None]
        self._first, self._count, self._size = part.start, part.size, build.size

    def bind(self) -> None:
        """Choose kernels; call when the weights are loaded."""
        if self.weight.blocks is not None:
            rows = take_block_rows.bind(self.weight.blocks)
            self._take_rows = lambda _, ids, out: rows(ids, out)

    def share_packed(self) -> None:
        """The head's packed copy of the weight serves here, too, and the weight goes."""
        if self._size == 1 and self.weight.blocks is None:
            rows = take_packed_rows.bind(self.weight.tensor)
            self._take_rows = lambda _, ids, out: rows(ids, out)
            self.weight.tensor = self.weight.tensor.new_empty(0)

    def run(self, ids: torch.Tensor, out: torch.Tensor, communicator: Communicator) -> None:
        if self._size == 1:
            self._take_rows(self.weight.tensor, ids, out)
            return
        local = ids - self._first
        is_mine = (local >= 0) & (local < self._count)
        torch.index_select(self.weight.tensor, 0, local.masked_fill(~is_mine, 0), out=out)
        out.masked_fill_(~is_mine[:, None], 0)
        communicator.all_reduce(out)


class Head:
    """hidden [N, H], normed here -> this rank's logits [N, ceil(vocab / size)]."""

    def __init__(
        self,
        build: BuildContext,
        vocab_size: int,
        hidden_size: int,
        *,
        norm_eps: float,
        tied: Parameter | None,
    ) -> None:
        self.norm = vector(build, hidden_size)
        self.is_tied = tied is not None
        self.weight = tied or vocab_parameter(build, vocab_size, hidden_size)
        self._signature = ProductSignature(
            in_features=hidden_size,
            out_features=len(self.weight.tensor),
            dtype=build.dtype,
            device_type=build.device.type,
            batch_invariant=build.batch_invariant,
            norm_eps=norm_eps,
        )

    def bind(self) -> None:
        """Choose kernels; call when the weights are loaded."""
        self._product = bind(
            "norm_linear",
            norm_linear.CANDIDATES,
            replace(self._signature, in_blocks=self.weight.blocks is not None),
            weight=self.weight.weight,
            norm_weight=self.norm.tensor,
        )
        self.keeps_weight = self._product.keeps_weight
        if not (self.is_tied or self.keeps_weight):
            self.weight.tensor = self.weight.tensor.new_empty(0)

    def run(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._product(x.shape[0], x, out, out)
