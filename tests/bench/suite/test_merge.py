"""Several runs as one result file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pelton.bench.suite.markdown import tables
from pelton.bench.suite.merge import merged
from pelton.errors import ConfigError


def run(commit, **values):
    rows = [
        {"subject": "tiny", "name": name, "unit": "ms", "status": "", "value": value, "samples": []}
        | dict.fromkeys(("peer", "floor", "goal", "ratio"))
        for name, value in values.items()
    ]
    return {
        "command": "pelton bench suite",
        "peers": {},
        "subjects": {"tiny": {"machine": {"commit": commit}}},
        "live": [],
        "rows": rows,
    }


def test_each_run_keeps_its_own_commit():
    whole = merged([run("aaa", decode1=4.0, decode8=None), run("bbb", decode8=5.0)])
    whole = merged([whole, run("ccc", prefill=6.0)])
    found = [
        (one["subjects"]["tiny"]["machine"]["commit"], [row["name"] for row in one["rows"]])
        for one in whole["runs"]
    ]
    assert found == [("aaa", ["decode1"]), ("bbb", ["decode8"]), ("ccc", ["prefill"])]
    text = tables(whole)
    assert text.index("commit aaa") < text.index("decode1") < text.index("commit bbb")


def test_nobody_chooses_among_figures():
    with pytest.raises(ConfigError, match="tiny/decode1 was measured by two of the runs"):
        merged([run("aaa", decode1=4.0), run("bbb", decode1=3.0)])


def test_as_a_program(tmp_path):
    for name, found in (("a", run("aaa", decode1=4.0)), ("b", run("bbb", decode8=5.0))):
        (tmp_path / name).write_text(json.dumps(found))
    command = [sys.executable, "-m", "pelton.bench.suite.merge", "out", "a", "b"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert len(json.loads((tmp_path / "out").read_text())["runs"]) == 2
