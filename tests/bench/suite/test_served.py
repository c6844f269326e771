"""Cases of a server, with a tiny one on the CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.tiny import VOCAB, tiny_llama

from pelton.bench.options import SuiteOptions
from pelton.bench.shapes import write_tokenizer
from pelton.bench.suite import cases, run, served
from pelton.bench.suite.cases import Case, Subject
from pelton.bench.suite.served import Served
from pelton.config.engine import EngineArgs
from pelton.errors import EngineError

CASE = Case("serve20", "serving", 20, 8, 5, long_len=90, seconds=1)
BUSY = Case("serve8", "serving", 8, 16, 7, long_len=4096, seconds=10)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_llama().iterdir():
        (folder / file.name).symlink_to(file)
    write_tokenizer(folder, VOCAB)
    return folder


def test_figures_of_a_server(model, monkeypatch, tmp_path):
    engine = {"model": str(model), "max_model_len": 128, "num_threads": 1, "max_num_seqs": 4}
    subject = Subject(
        "tiny", "cpu", None, engine, 1, (CASE,), "no",
        is_served=True,
    )  # fmt: skip
    monkeypatch.setattr(cases, "SUBJECTS", (subject,))
    path = tmp_path / "out.json"
    run.run(EngineArgs(device="cpu"), SuiteOptions(json=str(path), num_iters=1))
    result = json.loads(path.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["serve20_gap99", "serve20_first", "serve20_rate"]
    assert all(row["value"] > 0 for row in rows.values()), rows


@pytest.fixture
def measured(monkeypatch):
    """What is asked for, in place of a server."""
    seen = []

    class Outcome:
        def __init__(self, num_tokens):
            self.num_tokens = num_tokens

    async def measure(options, asked):
        seen.append((options, asked))
        latencies = {"itl": {"p99": 0.5}, "ttft": {"median": 0.25}}
        result = {"latencies_s": latencies, "output_tokens_per_s": 9.0, "errors": {"none": 1}}
        return result, [Outcome(len(seen) if len(seen) == 2 else 7) for _ in asked]

    monkeypatch.setattr(served.serving, "measure", measure)
    return seen


def draw(count, length):
    return np.zeros((count, length), np.int32)


def test_one_of_each_second_s_requests_is_long(measured):
    assert Served("http://x").run(BUSY, draw) == (0.5, 0.25, 9.0)
    ((options, asked),) = measured
    assert (options.request_rate, options.num_prompts, options.ignore_eos) == (8.0, 80, True)
    lengths = [len(one.prompt) for one in asked]
    assert lengths.count(4096) == 10
    assert lengths.count(16) == 70
    assert all(one.output_len == 7 for one in asked)


def test_times_differ_from_run_to_run_and_answers_must_be_whole(measured):
    side = Served("http://x")
    side.warm_up(BUSY, draw)
    with pytest.raises(EngineError, match="not every stream made 7 tokens"):
        side.run(BUSY, draw)
    assert measured[0][0].seed != measured[1][0].seed
    assert len(measured[0][1]) == 8
