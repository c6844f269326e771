"""`pelton serve` as its users run it: a process of its own, with a tiny model that can chat."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.folders import new_folder
from support.texts import CHAT_TEMPLATE, NUM_TOKENS, byte_backend
from support.tiny import tiny_llama

START_SECONDS = 120.0


@functools.cache
def chat_model(max_position_embeddings: int = 256) -> Path:
    """A folder with a tiny random Llama whose tokens are bytes, and a chat template."""
    weights = tiny_llama(
        vocab_size=NUM_TOKENS,
        max_position_embeddings=max_position_embeddings,
        eos_token_id=256,
        bos_token_id=257,
    )
    folder = new_folder("chat") / "tiny-chat"
    shutil.copytree(weights, folder)
    byte_backend().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class ServeProcess:
    """A running `pelton serve`. url: where it listens. process: to be signalled."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.url = ""
        self._lines: list[str] = []
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """What it has written so far."""
        return "".join(self._lines)

    def wait_until_ready(self) -> None:
        assert self._is_ready.wait(START_SECONDS), self.log
        assert self.url, f"it ended with {self.process.wait()}:\n{self.log}"

    def wait(self, seconds: float = 30) -> int:
        """Its exit code; everything that it wrote is in `log` then."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def engine_pid(self) -> int:
        """Its child's."""
        task = Path(f"/proc/{self.process.pid}/task")
        children = [
            int(child)
            for thread in task.iterdir()
            for child in (thread / "children").read_text().split()
        ]
        (engine,) = children
        return engine

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            if found := re.match(r"  URL +(\S+)", line):
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()


@contextlib.contextmanager
def serving(*flags: str, model: Path | None = None, **environment: str) -> Iterator[ServeProcess]:
    """Ends the process with SIGKILL if it still runs at the end."""
    command = [sys.executable, "-m", "pelton.cli.main", "serve", str(model or chat_model())]
    command += ["--port", "0", "--num-threads", "1", *flags]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    running = ServeProcess(process)
    try:
        running.wait_until_ready()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def is_running(pid: int) -> bool:
    """A process that has ended and waits to be reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_running(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields: Any = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def waited_for_processor(pid: int) -> float:
    """Seconds that a process's main thread was ready to run while others did; 0 where the system
    does not tell."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0
