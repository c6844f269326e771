"""Binding an op to a layer: once, when the layer is built.

An op's package has a contract, a signature type and CANDIDATES, best first. `bind` asks each
candidate whether it takes the signature and stacks the takers into a ladder over row counts: the
first taker whose `max_rows` is not exceeded runs. The last rung must take any number of rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pelton.errors import UnsupportedError

Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of an op.

    target: "module:factory"; factory(signature, **weights) returns the kernel.
    refuses: signature -> why it cannot be taken, or None.
    max_rows: most rows it is meant for, from 1 on; None = any, 0 included.
    copies_weight: it works on a copy of its own (prepacked), and the given weight may go.
    """

    name: str
    target: str
    refuses: Callable[[Any], str | None]
    max_rows: int | None = None
    copies_weight: bool = False

    def load(self) -> Callable[..., Kernel]:
        module, factory = self.target.split(":")
        return getattr(importlib.import_module(module), factory)  # type: ignore[no-any-return]


class BoundOp:
    """A ladder of kernels; called with the row count first. No rows go to the top, which takes any
    number of them.

    keeps_weight: whether a rung reads the weight that was given.
    """

    __slots__ = ("_rungs", "_top", "keeps_weight", "names")

    def __init__(
        self,
        rungs: Sequence[tuple[int | None, Kernel]],
        names: Sequence[str],
        *,
        keeps_weight: bool = True,
    ) -> None:
        self._top = rungs[-1][1]
        self._rungs = tuple((limit, kernel) for limit, kernel in rungs[:-1])
        self.names = tuple(names)
        self.keeps_weight = keeps_weight

    def __call__(self, num_rows: int, *args: Any) -> None:
        for limit, kernel in self._rungs:
            if 0 < num_rows <= limit:  # type: ignore[operator]
                kernel(*args)
                return
        self._top(*args)


def bind(op: str, candidates: Sequence[Candidate], signature: Any, **weights: Any) -> BoundOp:
    """The ladder of `op` for one layer.

    Raises UnsupportedError with the signature and every candidate's reason when none takes it.
    """
    rungs: list[tuple[int | None, Kernel]] = []
    names: list[str] = []
    reasons: list[str] = []
    keeps_weight = False
    for candidate in candidates:
        reason = candidate.refuses(signature)
        if reason is not None:
            reasons.append(f"{candidate.name}: {reason}")
            continue
        rungs.append((candidate.max_rows, candidate.load()(signature, **weights)))
        names.append(candidate.name)
        keeps_weight |= not candidate.copies_weight
        if candidate.max_rows is None:
            return BoundOp(rungs, names, keeps_weight=keeps_weight)
        reasons.append(f"{candidate.name}: only up to {candidate.max_rows} rows")
    raise UnsupportedError(f"no kernel of {op} for {signature}: " + "; ".join(reasons))
