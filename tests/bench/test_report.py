"""What a result says, and what it must not say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from pelton.bench import machine, report
from pelton.errors import ConfigError


def test_summary() -> None:
    summary = report.Summary.of([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (summary.low, summary.median, summary.high) == (1.0, 3.0, 5.0)
    assert summary.p10 == pytest.approx(1.4)
    assert summary.p90 == pytest.approx(4.6)


def test_ratios_are_per_pair(capsys: pytest.CaptureFixture[str]) -> None:
    result = report.print_ratios("decode", [2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert result["pairs"] == [2.0, 3.0, 1.0]
    assert result["median"] == 2.0
    assert "median 2.000, from 1.000 to 3.000" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--hf-token", "hush"], ["--hf-token=hush"]])
def test_the_command_is_told_without_the_token(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/pelton", "bench", "latency", "a b", *words])
    assert report.command().startswith("pelton bench latency 'a b' --hf-token")
    assert "hush" not in report.command()


def test_a_result_file_without_a_folder_is_refused_early(tmp_path: Path) -> None:
    report.check_writable(None)
    report.check_writable(str(tmp_path / "out.json"))
    with pytest.raises(ConfigError, match="does not exist"):
        report.check_writable(str(tmp_path / "nowhere" / "out.json"))


def test_result_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write_json(str(path), {"a": [1.5]})
    assert json.loads(path.read_text()) == {"a": [1.5]}


def test_facts_are_filled_in() -> None:
    found = machine.facts(torch.device("cpu"))
    assert found.cpu
    assert found.cores >= 1
    assert found.memory_bytes > 2**28
    assert found.gpu == ""
    assert found.torch == torch.__version__
    assert found.driver == found.triton == ""


def test_an_archive_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "pelton" / "bench" / "machine.py"))
    for written, commit in (("0123abcd\n", "0123abcd"), ("$Format:%h$\n", "")):
        monkeypatch.setattr(machine, "_ARCHIVED", tmp_path / "commit.txt")
        (tmp_path / "commit.txt").write_text(written)
        assert machine.facts(torch.device("cpu")).commit == commit
    (tmp_path / "commit.txt").unlink()
    assert machine.facts(torch.device("cpu")).commit == ""


def test_the_version_of_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(machine, "_DRIVER", path)
    assert machine._driver() == ""
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release\n")
    assert machine._driver() == "580.95.05"
