"""`pelton bench suite`, with a script in the engine's place, and once with the engine."""

from __future__ import annotations

import json
import sys

import pytest
from support.tiny import tiny_llama

from pelton.bench.options import SuiteOptions
from pelton.bench.suite import cases, run
from pelton.bench.suite.cases import Case, Subject
from pelton.config.engine import EngineArgs
from pelton.errors import ConfigError

CASES = (Case("decode1", "decode", 1, 4, 5), Case("prefill", "prefill", 2, 8, 1))
SUBJECT = Subject("tiny", "cpu", None, {"max_model_len": 64}, 2, CASES)
SCRIPT = """
import json, os, sys, time
request = json.load(sys.stdin)
write = os.fdopen(int(sys.argv[1]), "w", buffering=1)
for event in {events}:
    write.write(json.dumps(event) + chr(10))
{end}
"""
ALL = [
    {"ready": True},
    {"first_token": True},
    {"context": {"dtype": "float32"}},
    {"case": "decode1", "timing": [1.0, 5.0]},
    {"case": "decode1", "side": "other", "timing": [1.0, 9.0]},
    {"case": "prefill", "error": "ValueError: no"},
    {"case": "decode1", "timing": [1.0, 9.0]},
    {"ceilings": {"flops_per_s": 1.0}, "peaks": {}},
]


@pytest.fixture
def scripted(monkeypatch):
    """Puts a script that tells `events` in the child's place."""
    monkeypatch.setattr(cases, "SUBJECTS", (SUBJECT,))
    real = run.subprocess.Popen

    def set_up(events, end=""):
        script = SCRIPT.format(events=repr(events), end=end)
        started = []

        def popen(command, **options):
            started.append(options["env"])
            return real([sys.executable, "-c", script, command[-1]], **options)

        monkeypatch.setattr(run.subprocess, "Popen", popen)
        return started

    return set_up


def _suite(tmp_path, **options):
    path = tmp_path / "out.json"
    run.run(EngineArgs(device="cpu"), SuiteOptions(json=str(path), **options))
    return json.loads(path.read_text())


def _rows(result):
    return {row["name"]: row for row in result["rows"]}


def test_rows_and_file(scripted, tmp_path, capsys):
    started = scripted(ALL)
    result = _suite(tmp_path)
    rows = _rows(result)
    assert list(rows) == ["start_cold", "start_warm", "decode1", "first_token", "prefill"]
    assert rows["decode1"]["value"] == (7.0 - 1.0) / 4 * 1e3
    assert rows["first_token"]["value"] == 1000.0
    assert rows["prefill"]["status"] == "ValueError: no"
    assert 0 < rows["start_warm"]["value"] < 60
    assert rows["start_warm"]["status"] == "", "nothing to be compared with"
    assert result["subjects"]["tiny"]["timings_s"]["decode1"] == [[1.0, 5.0], [1.0, 9.0]]
    assert result["subjects"]["tiny"]["ceilings"] == {"flops_per_s": 1.0}
    assert [(one["peer"], one["ratios"]) for one in result["live"]] == [("other", [2.0])]
    cold, warm = started
    assert cold["TRITON_CACHE_DIR"] == warm["TRITON_CACHE_DIR"], "what the first start left"
    assert "4 met" not in capsys.readouterr().out


def test_one_process_where_no_start_is_asked_for(scripted, tmp_path):
    started = scripted(ALL)
    rows = _rows(_suite(tmp_path, only="decode1"))
    assert list(rows) == ["decode1", "first_token"]
    assert len(started) == 1


def test_a_process_that_dies_leaves_what_it_told(scripted, tmp_path):
    scripted(ALL[:4], end="os._exit(3)")
    rows = _rows(_suite(tmp_path, only="decode1,prefill"))
    assert rows["decode1"]["value"] == 1000.0
    assert rows["prefill"]["status"] == "failed with status 3"


def test_a_process_that_hangs_is_ended(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_GRACE_SECONDS", 0.5)
    scripted(ALL[:4], end="time.sleep(60)")
    rows = _rows(_suite(tmp_path, only="decode1,prefill", budget=2.0))
    assert rows["decode1"]["value"] == 1000.0
    assert rows["prefill"]["status"] == "did not end in time"


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the suite brings its own models"):
        run.run(EngineArgs(model="x", device="cpu"), SuiteOptions())
    with pytest.raises(ConfigError, match=r"device='auto'.*say which"):
        run.run(EngineArgs(), SuiteOptions())
    with pytest.raises(ConfigError, match="budget must be above 0"):
        SuiteOptions(budget=0)
    with pytest.raises(ConfigError, match="num_iters must be at least 1"):
        SuiteOptions(num_iters=0)
    with pytest.raises(ConfigError, match="the folder does not exist"):
        run.run(EngineArgs(device="cpu"), SuiteOptions(profile=str(tmp_path / "none")))


def test_with_an_engine(monkeypatch, tmp_path):
    engine = {"model": str(tiny_llama()), "max_model_len": 256, "num_threads": 1}
    subject = Subject("tiny", "cpu", None, engine, 2, CASES, "ready")
    monkeypatch.setattr(cases, "SUBJECTS", (subject,))
    result = _suite(tmp_path, only="decode1,prefill", profile=str(tmp_path))
    rows = _rows(result)
    assert all(row["value"] > 0 for row in rows.values())
    assert [len(row["samples"]) for row in rows.values()] == [2, 2, 2]
    context = result["subjects"]["tiny"]
    assert context["engine_args"]["enable_prefix_caching"] is False
    assert "hf_token" not in context["engine_args"]
    assert context["machine"]["cores"] >= 1
    assert context["ceilings"]["read_bytes_per_s"] > 0
    assert set(context["profiles"]) == {"decode1", "prefill"}
    trace = json.loads((tmp_path / "tiny-decode1.json").read_text())
    assert len(trace["traceEvents"]) > 20


def test_where_modules_are_no_bytecode_the_suite_keeps_it(scripted, tmp_path, monkeypatch):
    """A start would otherwise time Python's compiler."""
    ran = []
    monkeypatch.setattr(
        run.importlib.util, "cache_from_source", lambda path: str(tmp_path / "none.pyc")
    )
    monkeypatch.setattr(run.subprocess, "run", lambda command, **options: ran.append(options))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    started = scripted(ALL)
    _suite(tmp_path)
    (once,) = ran
    for env in (once["env"], *started):
        assert env["PYTHONPYCACHEPREFIX"] == once["env"]["PYTHONPYCACHEPREFIX"]
        assert "PYTHONDONTWRITEBYTECODE" not in env


def test_bytecode_that_is_there_is_used(scripted, tmp_path, monkeypatch):
    monkeypatch.setattr(run.importlib.util, "cache_from_source", lambda path: __file__)
    started = scripted(ALL)
    _suite(tmp_path)
    assert not any("PYTHONPYCACHEPREFIX" in env for env in started)
