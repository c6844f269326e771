"""Tables for people, from a result file."""

from __future__ import annotations

import dataclasses

from pelton.bench.suite.cases import SUBJECTS, Case
from pelton.bench.suite.markdown import tables
from pelton.bench.suite.table import rows_of_case


def test_tables():
    subject = SUBJECTS[0]
    rows = rows_of_case(subject, Case("decode8", "decode", 8, 128, 2), [(1.0, 1.001)], "")
    rows += rows_of_case(subject, Case("prefill", "prefill", 64, 4096, 1), [], "no time")
    result = {
        "began": "2026-11-30 12:00 UTC",
        "subjects": {
            subject.name: {"machine": {"gpu": "NVIDIA H200", "driver": "580.1", "cores": 16}}
        },
        "peers": {subject.name: {"name": "vLLM"}},
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    text = tables(result)
    assert f"{subject.name} on NVIDIA H200, 16 cores; driver 580.1, torch" in text
    assert "2026-11-30 12:00 UTC" in text
    assert "| decode8 | ms | 1.00 | 1 | 1.63 | 1.63 | 0.33 | 1.10 | met |" in text
    assert "| prefill | tokens/s |  | 0 | 350,402 |  | 518,000 | no slower | no time |" in text
