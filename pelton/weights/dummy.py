"""Random weights of the right shapes: for tests, profiling, and models without their weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.checkpoint.source import Checkpoint
from pelton.layers.parameter import Parameter

_STD = 0.02  # transformers' initializer_range
_WORD = 2**32


class DummySource:
    """As if a checkpoint named by `rules` held exactly what `parameters` want.

    A value depends on seed, tensor name and position alone, so every rank cuts its share from the
    same full tensor, and the values are made where the parameters lie, the same on every device.
    Weights are uniform with standard deviation 0.02, vectors that scale a norm are 1. Generator: a
    hash of the position, "lowbias32" of Chris Wellons (nullprogram.com, 2018), all in int32.
    """

    def __init__(self, parameters: Mapping[str, Parameter], rules: NameRules, seed: int) -> None:
        self._seed = seed
        devices = {parameter.tensor.device for parameter in parameters.values()}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
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

    def blocks(self, name: str) -> None:
        return None

    def read(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        shape = self._shapes[name]
        if dim != 0:
            return self.read(name, 0, 0, shape[0]).narrow(dim, start, size)
        if len(shape) == 1 and name.endswith(".weight"):
            return torch.ones(size, device=self._device)
        row = math.prod(shape[1:])
        return self._values(name, start * row, size * row).view(size, *shape[1:])

    def _values(self, name: str, first: int, count: int) -> torch.Tensor:
        """float32 values first:first+count of the flattened tensor."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        key, low = int.from_bytes(digest[:8], "little"), first % _WORD
        pieces: list[torch.Tensor] = []
        # Where the position's lower word begins again, the key is another.
        for start, stop in ((low, min(low + count, _WORD)), (0, low + count - _WORD)):
            if stop > start:
                word = (key + first // _WORD + len(pieces)) % _WORD
                pieces.append(_hashed(start, stop, word, self._device))
        bits = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        values = bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).to(torch.float32)
        return values.sub_(0x7FFFFF).mul_(_STD * math.sqrt(12) / 2**24)


def _hashed(start: int, stop: int, key: int, device: torch.device) -> torch.Tensor:
    """int32 of the positions start:stop, wrapped; at most 2**32 of them."""
    x = torch.arange(stop - start, dtype=torch.int32, device=device)
    x.add_(_int32(start)).bitwise_xor_(_int32(key * 0x9E3779B1))
    # A shift of int32 brings copies of the sign: the mask takes them away.
    scratch = torch.empty_like(x)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        if factor is not None:
            x.mul_(_int32(factor))
    return x


def _int32(number: int) -> int:
    """The same 32 bits as a signed number."""
    number %= _WORD
    return number - _WORD if number >= _WORD // 2 else number


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
