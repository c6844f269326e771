"""Result files of several runs of the suite as one, where one run has no time for all.

    python -m pelton.bench.suite.merge RESULT.json PART.json...

Each run stays as it was written, with its command, its commit and its card. Of a figure that
several runs have the last one's is kept, whatever it is: nobody chooses the better one. Rows
without a value are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def runs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a result file, merged or not."""
    found: list[dict[str, Any]] = result.get("runs", [result])
    return found


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All runs that still have a figure, in the order in which they began."""
    runs: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    every = [run for result in results for run in runs_of(result)]
    for run in sorted(every, key=_began, reverse=True):
        rows = [row for row in run["rows"] if row["value"] is not None and _key(row) not in seen]
        seen |= {_key(row) for row in rows}
        names = {row["subject"] for row in rows}
        if rows:
            subjects = {name: one for name, one in run["subjects"].items() if name in names}
            runs.append(run | {"subjects": subjects, "rows": rows})
    return {"runs": runs[::-1]}


def _began(run: dict[str, Any]) -> str:
    """Of runs that did not write it down: before all others."""
    began: str = run.get("began", "")
    return began


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["subject"], row["name"]


if __name__ == "__main__":
    target, *parts = sys.argv[1:]
    whole = merged([json.loads(Path(part).read_text()) for part in parts])
    Path(target).write_text(json.dumps(whole, indent=1) + "\n")
