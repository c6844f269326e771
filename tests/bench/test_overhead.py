"""`pelton bench overhead`: the server's side, and what is told."""

from __future__ import annotations

import numpy as np
import pytest
from support.processes import chat_model, gone_within

from pelton.bench.options import OverheadOptions
from pelton.bench.overhead import Sample, _Served, serve, tell
from pelton.config.engine import EngineArgs
from pelton.errors import EngineError


def test_the_servers_side() -> None:
    args = EngineArgs(model=str(chat_model()), num_threads=1, max_num_seqs=4)
    options = OverheadOptions(num_prompts=4, input_len=5, output_len=20)
    prompts = np.random.default_rng(0).integers(0, 256, (4, 5), dtype=np.int32)
    with serve(args) as (url, pid):
        sample = _Served(url, pid, options).sample(prompts)
    assert sample.tokens_per_s > 0
    assert 0 <= sample.api_cpu_s < 10
    assert 0 < sample.ttft_median_s < 30
    assert gone_within(pid, 5)


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(EngineError, match="did not start"), serve(EngineArgs(model="/no/model")):
        pass


def test_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    alone = [Sample(100.0), Sample(200.0), Sample(400.0)]
    served = [Sample(90.0, 0.1), Sample(200.0, 0.2), Sample(200.0, 0.3)]
    found = tell(alone, served, num_tokens=1000)
    assert found["ratio"]["pairs"] == [0.9, 1.0, 0.5]
    assert found["ratio"]["median"] == 0.9
    assert found["api_cpu_ms_per_token"]["median"] == pytest.approx(0.2)
    assert "served / alone: median 0.900" in capsys.readouterr().out
