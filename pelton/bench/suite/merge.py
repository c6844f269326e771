"""Result files of several runs of the suite as one, where one run has no time for all.

    python -m pelton.bench.suite.merge RESULT.json PART.json...

Each run stays as it was written, with its command, its commit and its card; rows without a value
are left out. A figure that two runs have is refused: nobody chooses the better one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pelton.errors import ConfigError


def runs_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of a result file, merged or not."""
    found: list[dict[str, Any]] = result.get("runs", [result])
    return found


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Raises ConfigError for a figure that was measured twice."""
    runs: list[dict[str, Any]] = []
    seen: set[tuple[str, str]] = set()
    for run in (run for result in results for run in runs_of(result)):
        rows = [row for row in run["rows"] if row["value"] is not None]
        names = {(row["subject"], row["name"]) for row in rows}
        if again := sorted(names & seen):
            raise ConfigError(
                f"{'/'.join(again[0])} was measured by two of the runs, and so were "
                f"{len(again) - 1} more: leave one run out, or measure with `only` what is missing."
            )
        seen |= names
        runs.append(run | {"rows": rows})
    return {"runs": runs}


if __name__ == "__main__":
    target, *parts = sys.argv[1:]
    whole = merged([json.loads(Path(part).read_text()) for part in parts])
    Path(target).write_text(json.dumps(whole, indent=1) + "\n")
