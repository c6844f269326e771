"""Staging's benchmark: every way brings the same words, and every phase is told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pelton.bench import staging
from pelton.bench.options import StagingOptions
from pelton.bench.staging_paths import Path, paths
from pelton.device.fake import FakeDevice
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError, IntegrityError


def test_every_way_of_every_case_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(staging, "CASES", {"1x4": (1, 4), "4x40": (4, 40)})
    path = tmp_path / "result.json"
    staging.run(StagingOptions(num_iters=2, num_iters_warmup=0, json=str(path)))
    result = json.loads(path.read_text())
    assert list(result["seconds"]) == ["1x4", "4x40", "64x100"]
    names = ["list, copy", "array, copy", "list, ring", "array, ring", "engine"]
    for found in result["seconds"].values():
        assert list(found) == list(staging.GROWTHS)
        for seconds in found.values():
            assert list(seconds) == names
            assert all(one["total"] > 0 for one in seconds.values())
    assert list(result["other_paths"]) == ["block tables", "embeddings", "result copy"]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("other") for line in lines) == 3
    assert sum(line.startswith("4x40") for line in lines) == 3 * 5


@pytest.mark.parametrize("mode", ["aliased", "pinned"])
def test_ways_are_right_on_a_device_that_is_late(mode):
    device = FakeDevice(mode)
    rows = np.arange(30, dtype=np.int32).reshape(3, 10)
    sides = staging.ways(device, rows)
    for num_words in (64, 0, 32):
        staging.measure(device, sides, num_words, num_iters=2, num_warmup=0)
        for side in sides:
            staging._check(device, side, rows)
    with pytest.raises(IntegrityError, match="engine brought other words"):
        staging._check(device, sides[-1], rows + 1)


@pytest.mark.parametrize(
    "wrong", [{"num_iters": 0}, {"num_iters_warmup": -1}, {"staging_mode": "fast"}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        StagingOptions(**wrong)


@pytest.mark.parametrize(
    ("device", "named"), [("gpu9", "not known"), ("cuda:x", "not known"), ("tpu", "not supported")]
)
def test_a_device_that_no_engine_takes_is_refused(device, named):
    with pytest.raises(ConfigError, match=named):
        staging.run(StagingOptions(device=device))


def test_the_harness_measures_any_function():
    """What is lapped and what is not: the rest, and the wait for the device, is `device`."""
    device = FakeDevice()
    ran = []

    def run(clock):
        clock.lap("convert")
        device.launch(ran.append, 1)
        clock.lap("launch")

    (seconds,) = staging.measure(device, [Path("mine", run)], 0, num_iters=3, num_warmup=1)
    assert ran == [1] * 4, "each run has ended before the next one begins"
    assert list(seconds) == [*staging.PHASES, "total"]
    assert seconds["write"] == 0
    assert min(seconds[phase] for phase in ("convert", "launch", "device")) > 0


@pytest.mark.parametrize("mode", STAGING_MODES)
def test_other_paths_bring_what_they_say(mode):
    device = FakeDevice(mode)
    for path in paths(device):
        before = device.num_launches
        staging.measure(device, [path], 0, num_iters=2, num_warmup=0)
        assert device.num_launches > before
