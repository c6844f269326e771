"""Random weights of the right shapes: for tests, profiling, and models without their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch

from pelton.checkpoint.name_map import NameRules, Rule
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
        # Where rules name two ways to store a part, the checkpoint has the first.
        taken: set[tuple[str, str | None]] = set()
        for rule in rules.rules:
            for layer in _layers(rule.target, parameters):
                target_name = rule.target.replace("{i}", layer)
                target, name = parameters[target_name], rule.source.replace("{i}", layer)
                experts = [
                    expert
                    for expert in _experts(rule, target)
                    if (target_name, rule.parts(expert)[0]) not in taken
                ]
                taken |= {(target_name, p) for expert in experts for p in rule.parts(expert)}
                shapes = [_shape(target, rule.parts(expert)) for expert in experts]
                if rule.is_stacked and shapes:
                    turn = -1 if rule.transform == "transpose" else 1
                    self._shapes[name] = (len(shapes), *shapes[0][::turn])
                elif not rule.is_stacked:
                    for expert, shape in zip(experts, shapes, strict=True):
                        self._shapes[name.replace("{e}", str(expert))] = shape

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


def _layers(pattern: str, parameters: Mapping[str, Parameter]) -> list[str]:
    """Indices of the layers that have such a parameter; [""] for one outside the layers."""
    before, found, after = pattern.partition("{i}")
    if not found:
        return [""] if pattern in parameters else []
    names = (name for name in parameters if name.startswith(before) and name.endswith(after))
    indices = (name[len(before) : len(name) - len(after)] for name in names)
    return [index for index in indices if index.isdecimal()]


def _experts(rule: Rule, target: Parameter) -> list[int | None]:
    """The experts whose parts the parameter has; [None] when parts are no expert's."""
    if not rule.is_per_expert:
        return [None] if all(part in target.parts for part in rule.parts()) else []
    experts: list[int | None] = []
    while all(part in target.parts for part in rule.parts(len(experts))):
        experts.append(len(experts))
    return experts


def _shape(target: Parameter, parts: tuple[str | None, ...]) -> tuple[int, ...]:
    """Of a tensor that holds the parts' rows one after the other."""
    shapes = [target.parts[part].source_shape for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])
