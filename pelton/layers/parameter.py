"""One rank's share of a weight, and how it is cut from the full tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from pelton.errors import ConfigError
from pelton.ops.block_weight import BlockWeight

PartName = str | None
Filled = Literal["loaded", "initialised", "replaced", "elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one tensor of the checkpoint gives to a parameter.

        source[start : start + size] (along `dim`)  ->  tensor[dst_start : dst_start + dst_size]

    source_shape: of the full tensor in the checkpoint. dst_start, dst_size: rows (dim 0) of this
    rank's tensor. A size of 0 is legal: the rank holds only padding.
    """

    source_shape: tuple[int, ...]
    dim: int
    start: int
    size: int
    dst_start: int
    dst_size: int


def whole(source_shape: tuple[int, ...], *, dst_start: int = 0) -> Part:
    """The full tensor, the same on every rank."""
    return shard(source_shape, 0, 1, dst_start=dst_start)


def shard(
    source_shape: tuple[int, ...],
    rank: int,
    size: int,
    *,
    dim: int = 0,
    unit: int = 1,
    dst_start: int = 0,
    may_replicate: bool = False,
) -> Part:
    """Rank `rank`'s equal share of `size` along `dim`, in indivisible runs of `unit` (a head).

    may_replicate: with fewer runs than ranks, each run stands on size / runs neighbouring ranks;
    right for KV heads alone, since what is summed over ranks must be there once. Raises ConfigError
    when the runs cannot be dealt out.
    """
    runs = source_shape[dim] // unit
    if runs % size == 0:
        first, count = rank * (runs // size), runs // size
    elif may_replicate and size % runs == 0:
        first, count = rank // (size // runs), 1
    else:
        raise ConfigError(
            f"tensor_parallel_size={size} cannot cut a weight of shape {source_shape} along dim "
            f"{dim}: {runs} units of {unit} do not divide by {size}."
        )
    return _part(source_shape, dim, first * unit, count * unit, dst_start)


def vocab_shard(source_shape: tuple[int, ...], rank: int, size: int) -> Part:
    """Rank `rank`'s share of the vocabulary (dim 0), of ceil(vocab / size) rows.

    The last ranks may hold fewer rows: the rest of their tensor is padding, which the layer that
    allocates the tensor sets to zero.
    """
    rows = -(-source_shape[0] // size)
    start = min(rank * rows, source_shape[0])
    return _part(source_shape, 0, start, min(rows, source_shape[0] - start), 0)


def _part(source_shape: tuple[int, ...], dim: int, start: int, size: int, dst_start: int) -> Part:
    return Part(
        source_shape=source_shape,
        dim=dim,
        start=start,
        size=size,
        dst_start=dst_start,
        dst_size=size if dim == 0 else source_shape[0],
    )


@dataclass(slots=True)
class Parameter:
    """This rank's tensor, its parts by name (None for the only part), and which are filled.

    filled: the completeness ledger's entries. "loaded": read from the checkpoint. "initialised":
    the layer set the values on purpose. "replaced": another tensor took its place (prepacking).
    "elsewhere": another pipeline stage holds it.
    takes_blocks: its layer has kernels for quantised blocks. blocks: what it is then, if it is; the
    tensor is empty.
    """

    tensor: torch.Tensor
    parts: Mapping[PartName, Part]
    filled: dict[PartName, Filled] = field(default_factory=dict)
    takes_blocks: bool = False
    blocks: BlockWeight | None = None

    @property
    def weight(self) -> torch.Tensor | BlockWeight:
        """For a kernel."""
        return self.tensor if self.blocks is None else self.blocks

    def keep_in_blocks(self, blocks: BlockWeight) -> None:
        self.blocks, self.tensor = blocks, self.tensor.new_empty(0)

    def part_tensor(self, name: PartName) -> torch.Tensor:
        """The rows that part `name` fills, a view: [dst_size, ...]."""
        part = self.parts[name]
        return self.tensor.narrow(0, part.dst_start, part.dst_size)

    def mark(self, name: PartName, how: Filled) -> None:
        """Enter a part into the ledger; each may be entered once."""
        assert name in self.parts, name
        assert name not in self.filled, f"part {name!r} is {self.filled[name]} already"
        self.filled[name] = how
