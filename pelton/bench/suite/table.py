"""The suite's rows: Pelton's figure beside the peer's, the floor and the goal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pelton.bench.suite.cases import Case, Subject, Timing
from pelton.bench.suite.figures import EQUAL, PEERS, Figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """value: Pelton's, in `unit`; samples: one of each run. ratio: of speeds, Pelton / peer.
    status: "met" | "missed" | "" (no goal), or why there is no value."""

    subject: str
    name: str
    unit: str
    status: str
    value: float | None = None
    samples: tuple[float, ...] = ()
    peer: float | None = None
    floor: float | None = None
    goal: float | None = None
    ratio: float | None = None


def rows_of_case(subject: Subject, case: Case, timings: Sequence[Timing], why: str) -> list[Row]:
    """why: the status where there are no timings."""
    if not timings:
        return [_row(subject, name, unit, None, [], why) for name, unit in case.rows()]
    values = case.values(timings)
    return [_row(subject, name, unit, *values[name], why="") for name, unit in case.rows()]


def row_of_start(subject: Subject, name: str, seconds: float | None, why: str = "") -> Row:
    samples = [] if seconds is None else [seconds]
    return _row(subject, name, "s", seconds, samples, why)


def _row(
    subject: Subject, name: str, unit: str, value: float | None, samples: Sequence[float], why: str
) -> Row:
    peer = PEERS.get(subject.name)
    figure = peer.figures.get(name) if peer else None
    ratio = None
    status = why if value is None else ""
    if value is not None and figure is not None and (figure.peer or figure.goal):
        ratio = _speed_ratio(value, figure.peer, unit)
        status = "met" if _is_met(value, figure, unit) else "missed"
    return Row(
        subject=subject.name,
        name=name,
        unit=unit,
        status=status,
        value=value,
        samples=tuple(samples),
        peer=(figure.peer or None) if figure else None,
        floor=(figure.floor or None) if figure else None,
        goal=figure.goal if figure else None,
        ratio=ratio,
    )


def _is_met(value: float, figure: Figure, unit: str) -> bool:
    if figure.goal is None:
        return _speed_ratio(value, figure.peer, unit) >= EQUAL
    return _speed_ratio(value, figure.goal, unit) >= 1.0


def _speed_ratio(value: float, other: float, unit: str) -> float:
    """Above 1: `value` is the quicker of the two."""
    return value / other if unit == "tokens/s" else other / value


def live_of(
    case: Case, timings: Sequence[Timing], others: Sequence[Timing]
) -> dict[str, Any] | None:
    """Of a peer's runs and Pelton's, in turns: its figure, and the ratios of speeds of the pairs,
    above 1 where Pelton is quicker. None without pairs."""
    pairs = list(zip(timings, others, strict=False))
    if not pairs:
        return None
    unit = case.rows()[0][1]
    ours = case.values([pair[0] for pair in pairs])[case.name][1]
    value, theirs = case.values([pair[1] for pair in pairs])[case.name]
    ratios = [_speed_ratio(a, b, unit) for a, b in zip(ours, theirs, strict=True)]
    return {"value": value, "unit": unit, "ratios": ratios, "ratio": statistics.median(ratios)}


def live_line(name: str, beside: dict[str, Any]) -> str:
    ratios = beside["ratios"]
    return (
        f"{'':14}{name:12} {beside['unit']:8} {_number(beside['value']):>9} in turns: Pelton at "
        f"{beside['ratio']:.2f} of its speed, from {min(ratios):.2f} to {max(ratios):.2f}, "
        f"{len(ratios)} pairs"
    )


def peak_lines(peaks: dict[str, Any]) -> list[str]:
    """What the CPU can do at most (machine.cpu_peaks), for people."""
    if not peaks:
        return []
    reads = ", ".join(f"{size} {v / 1e9:.1f}" for size, v in peaks["read_bytes_per_s"].items())
    products = ", ".join(f"{kind} {v / 1e9:.0f}" for kind, v in peaks["flops_per_s"].items())
    return [
        f"reads     GB/s by {peaks['threads']} threads: {reads}",
        f"products  GFLOP/s by {peaks['threads']} threads: {products}",
    ]


HEADER = (
    f"{'':14}{'':12} {'unit':8} {'Pelton':>9} {'low':>9} {'high':>9} {'runs':>4} "
    f"{'peer':>9} {'floor':>9} {'goal':>9} {'x peer':>7}"
)


def line(row: Row) -> str:
    """For people. A goal of "=" is to be no slower than the peer."""
    goal = "" if row.peer is None else "=" if row.goal is None else _number(row.goal)
    low, high = (min(row.samples), max(row.samples)) if row.samples else (None, None)
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return (
        f"{row.subject:14}{row.name:12} {row.unit:8} {_number(row.value):>9} {_number(low):>9} "
        f"{_number(high):>9} {len(row.samples):4} {_number(row.peer):>9} {_number(row.floor):>9} "
        f"{goal:>9} {ratio:>7}  {row.status}"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"
