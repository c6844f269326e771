"""`pelton run-batch` as a process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
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
    assert first.returncode == 3, first.stderr
    assert "nothing is left" not in first.stderr
    last = first.stderr.splitlines()[-1]
    assert "2 answered, 2 with an error, 0 were there already" in last
    records = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
    assert {name: (r["response"] or {}).get("status_code") for name, r in records.items()} == {
        "a": 200,
        "b": 200,
        "c": 400,
        None: None,
    }
    assert records["b"]["response"]["body"]["object"] == "chat.completion"
    before = target.read_bytes()
    # Nothing is left to do, so that not even the model is looked for.
    second = run_batch("no-such-model", *words[1:])
    assert second.returncode == 3, second.stderr
    assert "nothing is left to do" in second.stderr
    last = second.stderr.splitlines()[-1]
    assert "0 answered, 0 with an error, 4 were there already, 2 of them with an error" in last
    assert target.read_bytes() == before


def test_an_interrupt_says_what_is_done_and_a_rerun_goes_on(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    entry = {"custom_id": "short", "method": "POST", "url": "/v1/completions"}
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    lines = [
        {**entry, "body": {"prompt": "x", "max_tokens": 1}},
        *({**entry, "custom_id": f"long-{i}", "body": body} for i in range(4)),
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    words = ["-i", str(source), "-o", str(target), "--num-threads", "1"]
    command = [sys.executable, "-m", "pelton.cli.main", "run-batch", str(chat_model(8192)), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 100
            while not (target.exists() and target.read_bytes()):
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    last = said.splitlines()[-1]
    assert "interrupted: 1 answered, 0 with an error, 0 were there already" in last
    assert "the same command goes on from there" in last
    assert "Traceback" not in said
    source.write_text(json.dumps(lines[0]) + "\n" + json.dumps({**lines[0], "custom_id": "new"}))
    again = run_batch(str(chat_model(8192)), *words)
    assert again.returncode == 0
    assert "1 answered, 0 with an error, 1 were there already" in again.stderr.splitlines()[-1]


def test_wrong_files_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    found = run_batch("/no/model", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert found.returncode == 2
    assert "none cannot be read: No such file or directory." in found.stderr
    assert not (tmp_path / "out").exists()
