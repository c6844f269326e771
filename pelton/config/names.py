"""Help for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_NEAR = 0.75
"""Share of letters that two names have in common, in order. A wrong guess is worse than none."""


def near_name(given: str, known: Iterable[str]) -> str | None:
    """The one of `known` that was surely meant: it says `no-` for `disable-`, begins with `given`,
    or a letter or two differ; None if there is none."""
    names = sorted(known)
    opposite = given.replace("disable-", "no-", 1)
    if opposite != given and opposite in names:
        return opposite
    longer = [name for name in names if name.startswith(given)] if len(given) >= 3 else []
    near = difflib.get_close_matches(given, longer or names, n=1, cutoff=0.0 if longer else _NEAR)
    return near[0] if near else None


def known_names(given: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    nearest = near_name(given, names)
    hint = f" Did you mean {nearest!r}?" if nearest else ""
    return f"{hint} Known: {', '.join(names)}."
