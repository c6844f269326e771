"""How a checkpoint's tensor names become the model's parameter names: rules, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

_LAYER = "{i}"
_EXPERT = "{e}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor name, or one per layer where `{i}` stands for the layer's index, and one per
    expert where `{e}`, behind it, stands for the expert's.

    source: the checkpoint's name. target: the parameter's name.
    part: which part of a parameter that several tensors fill ("q", "k", "v", "gate", "up"); or the
        parts whose rows the tensor holds, one after the other. A part of an expert ends in `.{e}`
        ("gate.{e}"). Where the source has no `{e}` then, the tensor is a stack: dimension 0 is the
        expert, and the rest what an expert's own tensor would be.
    transform: "unpermute" undoes the order of rows in Llama's GGUF files: within each head, row
        pairs (j, j + head_dim / 2) were stored next to each other. "add_one": the file holds a
        norm's weight less one, as Gemma's does. "transpose": the matrices of a stack are stored
        with their columns first.
    interleaved: rows of a stack's parts take turns: a row of each, then the next of each.
    tied_to: when the model has no such parameter because it shares another's, the tensor is dropped
        after a check that it equals this one of the checkpoint.
    """

    source: str
    target: str
    part: str | tuple[str, ...] | None = None
    transform: Literal["unpermute", "add_one", "transpose"] | None = None
    tied_to: str | None = None
    interleaved: bool = False

    def parts(self, expert: int | None = None) -> tuple[str | None, ...]:
        """The parts that the tensor fills: of this expert, if they are an expert's."""
        names = self.part if isinstance(self.part, tuple) else (self.part,)
        if expert is None:
            return names
        return tuple(name and name.replace(_EXPERT, str(expert)) for name in names)

    @property
    def is_per_expert(self) -> bool:
        return _EXPERT in (self.parts()[0] or "")

    @property
    def is_stacked(self) -> bool:
        return self.is_per_expert and _EXPERT not in self.source


@dataclass(frozen=True, slots=True)
class NameRules:
    """All rules for one family and format. ignored: names dropped on purpose, also with `{i}`."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


class Match(NamedTuple):
    """rule and target are None for an ignored name. expert: the index that the name has, if any."""

    rule: Rule | None
    target: str | None
    expert: int | None = None


class NameMap:
    """`NameRules`, compiled once for looking names up."""

    def __init__(self, rules: NameRules) -> None:
        self._by_pattern: dict[str, Rule | None] = {}
        for pattern, rule in [
            *((r.source, r) for r in rules.rules),
            *((n, None) for n in rules.ignored),
        ]:
            assert pattern.count(_LAYER) <= 1, pattern
            assert pattern.count(_EXPERT) <= pattern.count(_LAYER), pattern
            assert pattern not in self._by_pattern, f"two rules for {pattern}"
            self._by_pattern[pattern] = rule

    def match(self, name: str) -> Match | None:
        """The rule for `name` and the parameter it fills, or None for an unknown name."""
        for pattern, layer, expert in self._patterns(name):
            if pattern in self._by_pattern:
                rule = self._by_pattern[pattern]
                target = rule.target.replace(_LAYER, layer) if rule else None
                return Match(rule, target, int(expert) if expert else None)
        return None

    @staticmethod
    def _patterns(name: str) -> list[tuple[str, str, str]]:
        """(name as it is, or with one of its numbers taken for a layer's index, or also with a
        later one for an expert's; the two indices)."""
        numbers = list(re.finditer(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])", name, re.ASCII))
        found = [(name, "", "")]
        for place, layer in enumerate(numbers):
            head = name[: layer.start()] + _LAYER
            found.append((head + name[layer.end() :], layer.group(), ""))
            found += [
                (
                    head + name[layer.end() : expert.start()] + _EXPERT + name[expert.end() :],
                    layer.group(),
                    expert.group(),
                )
                for expert in numbers[place + 1 :]
            ]
        return found
