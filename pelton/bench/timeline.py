"""A plot of a run against a server, as SVG: latencies over time, and tokens per second."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.bench.outcomes import Outcome, tokens_by_second

_WIDTH, _PANEL, _LEFT, _TOP = 800, 180, 70, 40
_COLOURS = {"E2E": "#2a78c8", "TTFT": "#d0652a", "tokens/s": "#3a8f4d"}


def timeline_svg(outcomes: Sequence[Outcome]) -> str:
    """Three panels above each other: E2E and TTFT by the time a request was sent, in seconds, and
    tokens per second."""
    good = [one for one in outcomes if not one.error]
    begin = min((one.sent for one in outcomes), default=0.0)
    duration = max((one.end for one in outcomes), default=0.0) - begin
    panels = {
        "E2E": [(one.sent - begin, one.e2e) for one in good],
        "TTFT": [(one.sent - begin, one.ttft) for one in good],
        "tokens/s": [
            (second + 0.5, float(count))
            for second, count in enumerate(tokens_by_second(good, begin))
        ],
    }
    height = _TOP + len(panels) * (_PANEL + _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, points) in enumerate(panels.items()):
        parts += _panel(name, points, max(duration, 1e-9), _TOP + number * (_PANEL + _TOP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    name: str, points: Sequence[tuple[float, float]], duration: float, top: int
) -> list[str]:
    high = max((value for _, value in points), default=0.0) * 1.05 or 1.0
    right, bottom = _WIDTH - 20, top + _PANEL
    unit = "" if name == "tokens/s" else " s"
    parts = [f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{name}</text>']
    for step in range(5):
        y = bottom - step * _PANEL / 4
        x = _LEFT + step * (right - _LEFT) / 4
        parts += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{step * high / 4:.3g}{unit}'
            "</text>",
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">'
            f"{step * duration / 4:.3g} s</text>",
        ]
    places = [
        (
            _LEFT + min(time / duration, 1.0) * (right - _LEFT),
            bottom - value / high * _PANEL,
        )
        for time, value in points
    ]
    colour = _COLOURS[name]
    if name == "tokens/s":
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    else:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.6"/>'
            for x, y in places
        ]
    return parts
