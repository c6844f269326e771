"""`pelton bench offloading`: what it refuses, and what it tells."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.bench import offloading
from pelton.bench.options import OffloadingOptions
from pelton.config.engine import EngineArgs
from pelton.errors import ConfigError


def counts(**numbers: int) -> dict[str, int]:
    return dict.fromkeys(offloading._COUNTS, 0) | numbers


def test_what_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    result = offloading.tell(
        [[1.0, 2.0, 1.0], [3.0, 4.0, 2.0]],
        [np.array([[5, 6], [7, 8]], np.int32), np.array([[5, 6], [7, 9]], np.int32)],
        [
            counts(num_preemptions=3, num_restored_tokens=40, num_scheduled_tokens=90),
            counts(num_preemptions=3, num_recomputed_tokens=50, num_scheduled_tokens=140),
        ],
    )
    assert result["ratio"]["pairs"] == [3.0, 2.0, 2.0]
    assert result["ratio"]["median"] == 2.0
    assert result["num_same_answers"] == 1
    assert result["sides"]["offloading"]["num_restored_tokens"] == 40
    out = capsys.readouterr().out
    assert "3 preemptions; of their tokens 40 copied back, 0 computed again; 90 computed" in out
    assert "median 2.000, from 2.000 to 3.000" in out
    assert "1 of 2 answers are the same" in out


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="kv_offloading_size must be given"):
        offloading.run(EngineArgs(), OffloadingOptions())
    with pytest.raises(ConfigError, match="baseline is of no use"):
        offloading.run(EngineArgs(kv_offloading_size=1), OffloadingOptions(baseline=True))
    tokens = np.zeros((1, 1), np.int32)
    with pytest.raises(ConfigError, match="No request was preempted"):
        offloading.tell([[1.0], [1.0]], [tokens, tokens], [counts(), counts()])
