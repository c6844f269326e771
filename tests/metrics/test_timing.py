from __future__ import annotations

import pytest

from pelton.metrics import timing
from pelton.metrics.timing import RequestTimes


def test_intervals_count_tokens_and_not_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source of the definitions: ITL and TPOT of tokens, however many come at once."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    times = RequestTimes(arrival=100.0)
    assert times.to_first is None
    assert times.per_output_token(0) is None
    now[0] = 102.0
    assert times.take(0, 1) is None
    assert times.to_first == 2.0
    assert times.per_output_token(0) is None
    now[0] = 103.0
    assert times.take(0, 4) == 0.25
    assert times.take(1, 1) is None
    now[0] = 104.0
    assert times.take(0, 1) == 1.0
    assert times.per_output_token(0) == pytest.approx(2.0 / 5)
    assert times.per_output_token(1) is None
    assert times.to_first == 2.0
    assert times.elapsed() == 4.0
