"""How a checkpoint's tensor names become the model's parameter names: rules, as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

_LAYER = "{i}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor name, or one per layer where `{i}` stands for the layer's index.

    source: the checkpoint's name. target: the parameter's name.
    part: which part of a parameter that several tensors fill ("q", "k", "v", "gate", "up"); or the
        parts whose rows the tensor holds, one after the other.
    transform: "unpermute" undoes the order of rows in Llama's GGUF files: within each head, row
        pairs (j, j + head_dim / 2) were stored next to each other. "add_one": the file holds a
        norm's weight less one, as Gemma's does.
    tied_to: when the model has no such parameter because it shares another's, the tensor is dropped
        after a check that it equals this one of the checkpoint.
    """

    source: str
    target: str
    part: str | tuple[str, ...] | None = None
    transform: Literal["unpermute", "add_one"] | None = None
    tied_to: str | None = None

    @property
    def parts(self) -> tuple[str | None, ...]:
        return self.part if isinstance(self.part, tuple) else (self.part,)


@dataclass(frozen=True, slots=True)
class NameRules:
    """All rules for one family and format. ignored: names dropped on purpose, also with `{i}`."""

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


class Match(NamedTuple):
    """rule and target are None for an ignored name."""

    rule: Rule | None
    target: str | None


class NameMap:
    """`NameRules`, compiled once for looking names up."""

    def __init__(self, rules: NameRules) -> None:
        self._by_pattern: dict[str, Rule | None] = {}
        for pattern, rule in [
            *((r.source, r) for r in rules.rules),
            *((n, None) for n in rules.ignored),
        ]:
            assert pattern.count(_LAYER) <= 1, pattern
            assert pattern not in self._by_pattern, f"two rules for {pattern}"
            self._by_pattern[pattern] = rule

    def match(self, name: str) -> Match | None:
        """The rule for `name` and the parameter it fills, or None for an unknown name."""
        for pattern, index in self._patterns(name):
            if pattern in self._by_pattern:
                rule = self._by_pattern[pattern]
                return Match(rule, rule.target.replace(_LAYER, index) if rule else None)
        return None

    @staticmethod
    def _patterns(name: str) -> list[tuple[str, str]]:
        """(name as it is, or with one of its numbers taken for a layer's index; that index)."""
        numbers = re.finditer(r"(?<![^.])(?:0|[1-9][0-9]*)(?![^.])", name, re.ASCII)
        return [
            (name, ""),
            *((name[: n.start()] + _LAYER + name[n.end() :], n.group()) for n in numbers),
        ]
