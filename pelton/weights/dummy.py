"""Random weights of the right shapes: for tests, profiling, and models without their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch

from pelton.checkpoint.name_map import NameRules
from pelton.checkpoint.source import Checkpoint
from pelton.layers.parameter import Parameter

_STD = 0.02  # transformers' initializer_range
_PER_BLOCK = 16  # 16-bit values in one of Philox's 256-bit outputs


class DummySource:
    """As if a checkpoint named by `rules` held exactly what `parameters` want.

    A value depends on seed, tensor name and position alone, so every rank cuts its share from the
    same full tensor. Weights are uniform with standard deviation 0.02, vectors that scale a norm
    are 1. Generator: Philox 4x64 (Salmon et al., SC 2011), which can start anywhere.
    """

    def __init__(self, parameters: Mapping[str, Parameter], rules: NameRules, seed: int) -> None:
        self._seed = seed
        self._shapes: dict[str, tuple[int, ...]] = {}
        for rule in rules.rules:
            layer = 0
            while (target := parameters.get(rule.target.replace("{i}", str(layer)))) is not None:
                if all(part in target.parts for part in rule.parts):
                    name = rule.source.replace("{i}", str(layer))
                    shapes = [target.parts[part].source_shape for part in rule.parts]
                    self._shapes[name] = (sum(shape[0] for shape in shapes), *shapes[0][1:])
                if "{i}" not in rule.target:
                    break
                layer += 1

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        parameters: Mapping[str, Parameter],
        rules: NameRules,
        seed: int,
    ) -> Self:
        return cls(parameters, rules, seed)

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        shape = self._shapes[name]
        if dim != 0:
            return self.read(name, 0, 0, shape[0]).narrow(dim, start, size)
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(size)
        row = math.prod(shape[1:])
        return self._values(name, start * row, size * row).view(size, *shape[1:])

    def _values(self, name: str, first: int, count: int) -> torch.Tensor:
        """float32 values first:first+count of the flattened tensor."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
        block, skipped = divmod(first, _PER_BLOCK)
        generator.advance(block)
        num_blocks = -(-(skipped + count) // _PER_BLOCK)
        raw = generator.random_raw(4 * num_blocks).astype("<u8").view("<u2")
        values = raw[skipped : skipped + count].astype(np.float32)
        values -= 32767.5
        values *= _STD * math.sqrt(12) / 65536
        return torch.from_numpy(values)
