"""`pelton bench speculation`: what it refuses, and what it tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pelton.bench import speculation
from pelton.bench.options import SpeculationOptions
from pelton.config.engine import EngineArgs
from pelton.core.scheduler import SchedulerStats
from pelton.errors import ConfigError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


def stats(**counts: int) -> SchedulerStats:
    names = [name for name in SchedulerStats.__dataclass_fields__ if name != "num_group_matches"]
    zero = SchedulerStats(**dict.fromkeys(names, 0), num_group_matches=())  # type: ignore[arg-type]
    return replace(zero, **counts)


def test_what_it_tells(capsys: pytest.CaptureFixture[str]) -> None:
    result = speculation.tell(
        [[1.0, 2.0, 1.0], [3.0, 4.0, 2.0]],
        [np.array([5, 6, 7], np.int32), np.array([5, 6, 8], np.int32)],
        stats(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=10),
        stats(num_drafts=20, num_draft_tokens=70, num_accepted_tokens=35),
        9,
        SpeculationOptions(output_len=3),
    )
    assert result["ratio"]["pairs"] == [3.0, 2.0, 2.0]
    assert result["ratio"]["median"] == 2.0
    assert result["acceptance_length"] == 3.5
    assert (result["num_draft_tokens"], result["num_accepted_tokens"]) == (40, 25)
    assert result["first_difference"] == 2
    out = capsys.readouterr().out
    assert "median 2.000, from 2.000 to 3.000" in out
    assert "differ from token 2 on" in out


def test_refusals(tmp_path) -> None:
    with pytest.raises(ConfigError, match="speculative_config must be given"):
        speculation.run(EngineArgs(), SpeculationOptions())
    args = EngineArgs(speculative_config=NGRAM)
    with pytest.raises(ConfigError, match="baseline is of no use"):
        speculation.run(args, SpeculationOptions(baseline=True))
    missing = str(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"prompt_file=.* cannot be read"):
        speculation.run(args, SpeculationOptions(prompt_file=missing))
