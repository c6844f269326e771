"""A suite's result file as tables for docs/performance.md.

python -m pelton.bench.suite.markdown RESULT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pelton.bench.suite.merge import runs_of


def tables(result: dict[str, Any]) -> str:
    """One table per model, each below what it was measured on; run by run."""
    return "\n".join(_tables(run) for run in runs_of(result))


def _tables(result: dict[str, Any]) -> str:
    parts = []
    for name, subject in result["subjects"].items():
        rows = [row for row in result["rows"] if row["subject"] == name]
        machine = subject.get("machine", {})
        peer = result["peers"].get(name, {}).get("name", "peer")
        where = machine.get("gpu") or machine.get("cpu", "an unknown machine")
        driver = f"driver {machine['driver']}, " if machine.get("driver") else ""
        parts.append(
            f"{name} on {where}, {machine.get('cores', '?')} cores; {driver}torch "
            f"{machine.get('torch', '?')}, commit {machine.get('commit') or 'not known'}, "
            f"{result.get('began', 'nobody knows when')}:\n"
        )
        parts.append(f"| | unit | Pelton | runs | {peer} | ratio of speeds | floor | goal | |")
        parts.append("|---|---|---|---|---|---|---|---|---|")
        parts += [_line(row) for row in rows]
        parts.append("")
    return "\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    goal = "no slower" if row["goal"] is None and row["peer"] is not None else _number(row["goal"])
    cells = [
        row["name"],
        row["unit"],
        _number(row["value"]),
        str(len(row["samples"])),
        _number(row["peer"]),
        _number(row["ratio"]),
        _number(row["floor"]),
        goal,
        row["status"],
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
