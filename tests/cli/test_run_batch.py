"""`pelton run-batch` as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.processes import chat_model


def run_batch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pelton.cli.main", "run-batch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_file_twice(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": 3}},
    ]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n{\n")
    words = [str(chat_model()), "-i", str(source), "-o", str(target), "--num-threads", "1"]
    first = run_batch(*words)
    assert first.returncode == 0, first.stderr
    assert "2 answered, 2 with an error, 0 were there already" in first.stderr
    records = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert {name: (r["response"] or {}).get("status_code") for name, r in records.items()} == {
        "a": 200,
        "b": 200,
        "c": 400,
        None: None,
    }
    assert records["b"]["response"]["body"]["object"] == "chat.completion"
    before = target.read_bytes()
    second = run_batch(*words)
    assert "0 answered, 0 with an error, 4 were there already" in second.stderr
    assert target.read_bytes() == before


def test_wrong_files_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    found = run_batch("/no/model", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert found.returncode == 2
    assert "none cannot be read: No such file or directory." in found.stderr
    assert not (tmp_path / "out").exists()
