"""A row says how Pelton stands to the peer, the floor and the goal."""

from __future__ import annotations

import pytest

from pelton.bench.suite import table
from pelton.bench.suite.cases import SUBJECTS, Case
from pelton.bench.suite.figures import Figure, Peer
from pelton.bench.suite.table import line, row_of_start, rows_of_case

SUBJECT = SUBJECTS[0]
DECODE = Case("decode8", "decode", 8, 128, 2)


@pytest.fixture(autouse=True)
def figures(monkeypatch):
    found = {
        "decode8": Figure(4.0, 1.0, 2.0),
        "offline": Figure(100.0),
        "start_warm": Figure(10.0, goal=5.0),
    }
    monkeypatch.setattr(table, "PEERS", {SUBJECT.name: Peer("x", "y", found)})


@pytest.mark.parametrize(
    ("seconds", "ratio", "status"), [(0.00199, 2.01, "met"), (0.00201, 1.99, "missed")]
)
def test_time_against_a_goal(seconds, ratio, status):
    (row,) = rows_of_case(SUBJECT, DECODE, [(1.0, 1.0 + seconds)], "")
    assert row.ratio == pytest.approx(ratio, abs=0.001)
    assert row.status == status
    assert (row.peer, row.floor, row.goal) == (4.0, 1.0, 2.0)


@pytest.mark.parametrize(("seconds", "status"), [(1.0, "met"), (1.05, "met"), (1.06, "missed")])
def test_no_slower_has_a_margin(seconds, status):
    case = Case("offline", "output", 10, 5, 10)
    (row,) = rows_of_case(SUBJECT, case, [(0.0, seconds)], "")
    assert row.status == status
    assert row.ratio == pytest.approx(1 / seconds)


def test_without_timings_there_is_a_reason():
    (row,) = rows_of_case(SUBJECT, DECODE, [], "it rained")
    assert (row.value, row.ratio, row.status) == (None, None, "it rained")
    assert line(row).endswith("it rained")


def test_without_figures_nothing_is_met_or_missed():
    (row,) = rows_of_case(SUBJECT, Case("decode3", "decode", 3, 1, 2), [(1.0, 2.0)], "")
    assert (row.value, row.status, row.peer, row.goal) == (1000.0, "", None, None)


def test_a_floor_alone_is_told_and_nothing_is_met_or_missed(monkeypatch):
    found = {"far": Figure(floor=0.5)}
    monkeypatch.setattr(table, "PEERS", {SUBJECT.name: Peer("", "y", found)})
    (row,) = rows_of_case(SUBJECT, Case("far", "decode", 3, 1, 2), [(1.0, 1.001)], "")
    assert (row.floor, row.peer, row.ratio, row.status) == (0.5, None, None, "")
    assert "-" in line(row)


def test_a_start():
    row = row_of_start(SUBJECT, "start_warm", 4.0)
    assert (row.status, row.ratio, row.unit) == ("met", 2.5, "s")
    assert row_of_start(SUBJECT, "start_warm", None, "why").status == "why"


def test_live():
    case = Case("o", "output", 10, 5, 10)
    beside = table.live_of(case, [(0, 1.0), (0, 1.0), (0, 1.0)], [(0, 2.0), (0, 4.0)])
    assert beside["ratios"] == [2.0, 4.0]
    assert beside["ratio"] == 3.0
    assert beside["value"] == 100 / 3.0
    assert "Pelton at 3.00 of its speed, from 2.00 to 4.00, 2 pairs" in table.live_line("x", beside)
    decode = table.live_of(DECODE, [(1.0, 2.0)], [(1.0, 1.5)])
    assert decode["ratio"] == 0.5
    assert table.live_of(case, [(0, 1.0)], []) is None


def test_peaks_are_told():
    peaks = {"threads": 2, "read_bytes_per_s": {"8 MiB": 5e10}, "flops_per_s": {"float32": 3e11}}
    reads, products = table.peak_lines(peaks)
    assert reads.endswith("by 2 threads: 8 MiB 50.0")
    assert products.endswith("by 2 threads: float32 300")
    assert table.peak_lines({}) == []


def test_lines_are_columns():
    (decode,) = rows_of_case(SUBJECT, DECODE, [(1.0, 1.002), (1.0, 1.004)], "")
    (other,) = rows_of_case(SUBJECT, Case("o", "output", 10, 5, 9999), [(0.0, 1.0)], "")
    width = len(table.HEADER)
    for row in (decode, other):
        assert line(row)[width - 1] != " " or row.ratio is None
        assert line(row)[width : width + 2].strip() == ""
    assert "      3.00      2.00      4.00    2" in line(decode)
