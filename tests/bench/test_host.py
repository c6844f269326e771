"""The host's work for a step, measured on a device that computes nothing."""

from __future__ import annotations

import json

import pytest
from support.tiny import tiny_llama

from pelton.bench import host
from pelton.bench.options import HostOptions
from pelton.config.engine import EngineArgs
from pelton.errors import ConfigError


def test_every_part_of_every_step_is_told(tmp_path, capsys):
    path = tmp_path / "result.json"
    options = HostOptions(rows="1,5", output_len=12, num_iters=2, json=str(path))
    host.run(EngineArgs(model=str(tiny_llama()), enable_prefix_caching=False), options)
    result = json.loads(path.read_text())
    assert list(result["rows"]) == ["1", "5"]
    for found in result["rows"].values():
        assert all(found[name] > 0 for name in host.PARTS[:-1])
        # Text is a difference, and there is little of it.
        assert sum(found[name] for name in host.PARTS) <= 2 * found["step"]["high"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:-1]] == ["1", "5"]


def test_all_rows_decode_together_and_no_kernel_runs(monkeypatch):
    engine = host._Engine(
        EngineArgs(model=str(tiny_llama()), max_num_seqs=4, max_num_batched_tokens=200)
    )
    called = []
    monkeypatch.setattr(host.IdleDevice, "launch", lambda self, *args: called.append(args))
    steps = engine.decode_steps(4, input_len=5, output_len=9)
    assert len(steps) == 9 - 2
    assert called
    assert not engine.loop.has_work()
    engine.loop.scheduler.check_integrity()


@pytest.mark.parametrize(
    "options", [{"rows": "0"}, {"rows": "1,x"}, {"rows": ""}, {"output_len": 3}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError):
        HostOptions(**options)


def test_a_baseline_is_refused():
    with pytest.raises(ConfigError, match="baseline"):
        host.run(EngineArgs(), HostOptions(baseline=True))
