"""Decode steps in each staging mode: the same work on every side, and all of it told."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from support.tiny import tiny_llama

from pelton.bench import modes
from pelton.bench.options import ModesOptions
from pelton.config.engine import EngineArgs
from pelton.core.plan import StepPlan
from pelton.device.table import STAGING_MODES
from pelton.errors import ConfigError, EngineError


def args(**changes: Any) -> EngineArgs:
    return EngineArgs(
        model=str(tiny_llama()), device="fake", enable_prefix_caching=False, **changes
    )


def test_every_mode_of_every_case_is_told(tmp_path, capsys):
    path = tmp_path / "result.json"
    options = ModesOptions(rows="1,3", num_steps=6, num_iters=2, num_iters_warmup=0, json=str(path))
    modes.run(args(), options)
    result = json.loads(path.read_text())
    assert list(result["cases"]) == [f"{n}, {case}" for n in (1, 3) for case in modes.CASES]
    for found in result["cases"].values():
        assert list(found) == list(STAGING_MODES)
        for one in found.values():
            assert 0 < one["launch_s"] < one["step_s"]["high"]
        assert found["aliased"]["more_s"]["median"] == 0
    assert [line.split()[4] for line in result["staging"]] == [f"{m}" for m in STAGING_MODES]
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("    3 arrivals") for line in lines) == 3


@pytest.mark.parametrize("case", modes.CASES)
def test_what_happens_in_a_case(case):
    """Of 12 steps with 4 rows: who is new, and who gets a block."""
    options = ModesOptions(num_steps=12, arrival_every=3, input_len=30)
    engine = modes.ModeEngine(
        args(max_num_seqs=4, max_model_len=120, num_gpu_blocks_override=64, block_size=4)
    )
    plans: list[StepPlan] = []
    execute = engine.worker.execute

    def seen(plan: StepPlan) -> Any:
        plans.append(plan)
        return execute(plan)

    vars(engine.worker)["execute"] = seen
    sample = engine.sample(4, case, options)
    assert not engine.loop.has_work()
    engine.loop.scheduler.check_integrity()
    arrivals = [len(plan.new_rows) for plan in plans]
    assert arrivals[0] == 4
    assert sum(arrivals) == len(sample.tokens) == 4 + (4 if case == "arrivals" else 0)
    if case != "arrivals":
        decodes = [plan for plan in plans if modes._decodes(plan, 4)]
        appends = {len(plan.block_appends) for plan in decodes}
        assert appends == ({0, 4} if case == "steady" else {1})
    assert sample.step_s > sample.launch_s > 0
    assert engine.sample(4, case, options).tokens == sample.tokens


def test_modes_that_make_other_tokens_are_an_error():
    sample = modes.Sample(1.0, 0.5, [[1, 2]])
    other = dataclasses.replace(sample, tokens=[[1, 3]])
    with pytest.raises(EngineError, match="4 rows, steady: pinned made other tokens than aliased"):
        modes.tell(4, "steady", ["aliased", "pinned"], [[sample], [other]])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"modes": "aliased,fast"}, "modes must be of"),
        ({"modes": "pinned,pinned"}, "modes must be of"),
        ({"modes": ""}, "modes must be of"),
        ({"rows": "0"}, "rows must be"),
        ({"num_steps": 0}, "num_steps"),
        ({"arrival_every": 0}, "arrival_every"),
    ],
)
def test_wrong_options_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        ModesOptions(**options)


@pytest.mark.parametrize("options", [{"baseline": True}, {"profile": "trace.json"}])
def test_what_means_nothing_here_is_refused(options):
    with pytest.raises(ConfigError, match="baseline, profile"):
        modes.run(args(), ModesOptions(**options))
