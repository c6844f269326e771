"""Where weights are read from."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, cast

import torch

from pelton.checkpoint.name_map import NameRules
from pelton.checkpoint.source import Checkpoint
from pelton.layers.parameter import Parameter
from pelton.weights.table import FORMATS


@dataclass(frozen=True, slots=True)
class Blocks:
    """form: a type of GGUF's. rows: uint8 [N, bytes], the file's own memory, for reading only."""

    form: str
    rows: torch.Tensor


class WeightSource(Protocol):
    """The full tensors of a checkpoint, read in slices."""

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Parameter],
        rules: NameRules,
        seed: int,
    ) -> Self:
        """Read the headers. parameters, rules and seed are what random weights follow from; a
        source with files has no use for them. Raises CheckpointError for files that are not whole.
        """
        ...

    def names(self) -> Sequence[str]:
        """All tensors, in an order that is good for reading."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the full tensor, rows first."""
        ...

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        """Elements start:start+size along `dim`, all of the other dimension.

        Returns a floating-point tensor, for reading only: it may be the file's own memory. It lies
        in host memory, or where the parameters do.
        Raises UnsupportedError naming tensor and type when the stored type is not implemented.
        """
        ...

    def blocks(self, name: str) -> Blocks | None:
        """The tensor as it is stored, if that is in quantised blocks."""
        ...


def open_source(
    checkpoint: Checkpoint,
    parameters: Mapping[str, Parameter],
    rules: NameRules,
    *,
    seed: int = 0,
) -> WeightSource:
    """The source that `checkpoint.load_format` names in the table."""
    module, _, name = FORMATS[checkpoint.load_format].partition(":")
    kind = cast(type[WeightSource], getattr(importlib.import_module(module), name))
    return kind.open(checkpoint, parameters, rules, seed)
