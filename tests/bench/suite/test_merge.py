"""Several runs as one result file."""

from __future__ import annotations

import json
import subprocess
import sys

from pelton.bench.suite.markdown import tables
from pelton.bench.suite.merge import merged


def run(commit, began=None, **values):
    rows = [
        {"subject": "tiny", "name": name, "unit": "ms", "status": "", "value": value, "samples": []}
        | dict.fromkeys(("peer", "floor", "goal", "ratio"))
        for name, value in values.items()
    ]
    return {
        "command": "pelton bench suite",
        **({"began": began} if began else {}),
        "peers": {},
        "subjects": {"tiny": {"machine": {"commit": commit}}},
        "live": [],
        "rows": rows,
    }


def found(whole):
    return [
        (one["subjects"]["tiny"]["machine"]["commit"], {r["name"]: r["value"] for r in one["rows"]})
        for one in whole["runs"]
    ]


def test_each_run_keeps_its_own_commit():
    whole = merged([run("bbb", "2026-11-30 12:00 UTC", decode8=5.0), run("aaa", decode1=4.0)])
    whole = merged([whole, run("ccc", "2026-11-30 13:00 UTC", prefill=6.0, start_warm=None)])
    assert found(whole) == [
        ("aaa", {"decode1": 4.0}),
        ("bbb", {"decode8": 5.0}),
        ("ccc", {"prefill": 6.0}),
    ]
    text = tables(whole)
    assert text.index("commit aaa") < text.index("decode1") < text.index("commit bbb")


def test_the_last_figure_counts_whatever_it_is():
    early = run("aaa", "2026-11-30 12:00 UTC", decode1=3.0, decode8=4.0)
    late = run("bbb", "2026-11-30 13:00 UTC", decode1=9.0)
    last = run("ccc", "2026-11-30 14:00 UTC", decode1=None)
    for order in ([early, late, last], [last, late, early]):
        assert found(merged(order)) == [("aaa", {"decode8": 4.0}), ("bbb", {"decode1": 9.0})]
    assert found(merged([early, run("bbb", "2026-11-30 13:00 UTC", decode1=9.0, decode8=8.0)])) == [
        ("bbb", {"decode1": 9.0, "decode8": 8.0})
    ]


def test_as_a_program(tmp_path):
    for name, one in (("a", run("aaa", decode1=4.0)), ("b", run("bbb", decode8=5.0))):
        (tmp_path / name).write_text(json.dumps(one))
    command = [sys.executable, "-m", "pelton.bench.suite.merge", "out", "a", "b"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert len(json.loads((tmp_path / "out").read_text())["runs"]) == 2
