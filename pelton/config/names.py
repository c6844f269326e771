"""Help for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def known_names(given: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"{hint} Known: {', '.join(names)}."
