"""`pelton bench suite`: all that is promised about a device's speed, in one go.

Each subject has a process of its own, which leaves the device as it found it; so one that fails
takes no other along, and a start is timed from exec. The result file is written anew after each
event.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pelton.bench import report
from pelton.bench.options import SuiteOptions
from pelton.bench.suite.cases import ENGINE, Case, Subject, Timing, chosen
from pelton.bench.suite.child import Request
from pelton.bench.suite.figures import PEERS
from pelton.bench.suite.table import (
    HEADER,
    Row,
    line,
    live_line,
    live_of,
    peak_lines,
    row_of_start,
    rows_of_case,
)
from pelton.config.engine import EngineArgs
from pelton.errors import ConfigError

_GRACE_SECONDS = 60.0
"""A process that has not ended so long after its deadline is ended: something hangs."""
_NO_TIME = "not run: the budget is spent"
_IMPORTS = (
    "import importlib.util, pelton.bench.suite.child; "
    "importlib.util.find_spec('triton') and importlib.import_module('triton')"
)
# Where compiled kernels are kept: Triton's, those of the CPU's own sources, the driver's.
_CACHES = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")


def run(args: EngineArgs, options: SuiteOptions) -> None:
    """Measures, prints, writes the result file."""
    if args.model is not None:
        raise ConfigError(f"model={args.model!r}: the suite brings its own models; leave it out.")
    if args.device in ("auto", "fake"):
        raise ConfigError(f'device={args.device!r}: the suite is of "cuda" or "cpu"; say which.')
    report.check_writable(options.json)
    if options.profile is not None and not Path(options.profile).is_dir():
        raise ConfigError(f"profile={options.profile!r}: the folder does not exist; create it.")
    subjects = chosen(args.device.partition(":")[0], options.only)
    deadline = time.monotonic() + options.budget
    result = Result(options.json)
    # So that what is measured is told, and no process is left behind, whoever ends this one.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="pelton-bytecode-") as kept:
        env = dict(os.environ)
        if any(has_start for _, has_start in subjects):
            env = _with_bytecode(env, kept)
        print(HEADER, flush=True)
        for index, (subject, has_start) in enumerate(subjects):
            now = time.monotonic()
            share = now + max(0.0, deadline - now) / (len(subjects) - index)
            with tempfile.TemporaryDirectory(prefix="pelton-suite-") as folder:
                _Run(subject, args, options, result, share).measure(Path(folder), env, has_start)
    result.end()


def _with_bytecode(env: dict[str, str], folder: str) -> dict[str, str]:
    """`env`, in which modules are at hand as bytecode, as pip leaves them. Some images have none,
    and there a start would time Python's compiler, of 1,500 modules of others."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    if Path(importlib.util.cache_from_source(spec.origin)).exists():
        return env
    print(f"bytecode  is kept for this suite, since {Path(spec.origin).parent} has none")
    env = {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = folder
    subprocess.run([sys.executable, "-c", _IMPORTS], env=env, check=True)
    return env


class Result:
    """What is known so far, in memory and in the file."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self._rows: dict[str, list[Row]] = {}
        self._contexts: dict[str, Any] = {}
        self._live: list[dict[str, Any]] = []

    def add(self, subject: str, rows: list[Row]) -> None:
        self._rows.setdefault(subject, []).extend(rows)
        for row in rows:
            print(line(row), flush=True)
        self.write()

    def add_live(self, subject: str, name: str, case: str, beside: dict[str, Any]) -> None:
        """Of a peer that ran in turns with Pelton."""
        self._live.append({"subject": subject, "peer": name, "name": case, **beside})
        print(live_line(name, beside), flush=True)
        self.write()

    def note(self, subject: str, **context: Any) -> None:
        self._contexts.setdefault(subject, {}).update(context)
        self.write()

    def write(self) -> None:
        if self._path is None:
            return
        found = {
            "command": report.command(),
            "began": self._began,
            "peers": {
                name: {"name": PEERS[name].name, "source": PEERS[name].source}
                for name in self._contexts
                if name in PEERS
            },
            "subjects": self._contexts,
            "live": self._live,
            "rows": [dataclasses.asdict(row) for rows in self._rows.values() for row in rows],
        }
        # Renamed into place: a reader, or a kill, in the midst of writing finds a whole file.
        part = Path(self._path + ".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(self._path)

    def end(self) -> None:
        rows = [row for found in self._rows.values() for row in found]
        counts = {word: sum(row.status == word for row in rows) for word in ("met", "missed")}
        num_without = sum(row.value is None for row in rows)
        print(f"{counts['met']} met, {counts['missed']} missed, {num_without} without a figure")
        if self._path is not None:
            print(f"written   {self._path}")


class _Run:
    """One subject's processes."""

    def __init__(
        self,
        subject: Subject,
        args: EngineArgs,
        options: SuiteOptions,
        result: Result,
        deadline: float,
    ) -> None:
        self._subject = subject
        self._options = options
        self._result = result
        self._deadline = deadline
        values = {
            field.name: value
            for field in dataclasses.fields(args)
            if (value := getattr(args, field.name)) != field.default
        }
        self._args = {**subject.engine, "enable_prefix_caching": False, **values}

    def measure(self, folder: Path, env: dict[str, str], has_start: bool) -> None:
        """folder: for caches of its own; env: of its processes."""
        subject = self._subject
        if has_start:
            env = env | {name: str(folder / name.lower()) for name in _CACHES}
            cold = self._start(env)
            if subject.start == "first token":
                self._add_start("start_cold", cold)
        if not subject.cases and not has_start:
            return
        timings: dict[str, list[Timing]] = {case.name: [] for case in subject.cases}
        profiles: dict[str, Any] = {}
        live: dict[str, dict[str, list[Timing]]] = {}
        errors: dict[str, str] = {}
        fault = _NO_TIME
        is_ready = not has_start
        try:
            for seconds, event in self._events(list(subject.cases), env):
                if event.get("side", ENGINE) != ENGINE:
                    if "timing" in event:
                        others = live.setdefault(event["side"], {})
                        others.setdefault(event["case"], []).append(tuple(event["timing"]))
                        self._result.note(subject.name, live_timings_s=live)
                elif "timing" in event:
                    timings[event["case"]].append(tuple(event["timing"]))
                    self._result.note(subject.name, timings_s=timings)
                elif "profile" in event:
                    profiles[event["case"]] = event["profile"]
                    self._result.note(subject.name, profiles=profiles)
                elif "case" in event:
                    errors[event["case"]] = event["error"]
                elif "fault" in event:
                    fault = event["fault"]
                elif self._ends_start(event) and not is_ready:
                    is_ready = True
                    self._add_start("start_warm", seconds)
                elif "context" in event:
                    self._result.note(subject.name, **event["context"])
                elif "ceilings" in event:
                    self._result.note(subject.name, **event)
                    for text in peak_lines(event["peaks"]):
                        print(text)
        finally:
            if not is_ready:
                self._add_start("start_warm", None, fault)
            for case in subject.cases:
                why = errors.get(case.name, fault)
                found = timings[case.name]
                self._result.add(subject.name, rows_of_case(subject, case, found, why))
                for name, others in live.items():
                    beside = live_of(case, found, others.get(case.name, []))
                    if beside is not None:
                        self._result.add_live(subject.name, name, case.name, beside)

    def _ends_start(self, event: dict[str, Any]) -> bool:
        return self._subject.start.replace(" ", "_") in event

    def _trace_path(self) -> str | None:
        folder = self._options.profile
        return None if folder is None else str(Path(folder) / self._subject.name)

    def _add_start(self, name: str, seconds: float | None, why: str = _NO_TIME) -> None:
        self._result.add(self._subject.name, [row_of_start(self._subject, name, seconds, why)])

    def _start(self, env: dict[str, str]) -> float | None:
        """Seconds of a start with `env` that does nothing else."""
        found = None
        for seconds, event in self._events([], env):
            if self._ends_start(event):
                found = seconds
        return found

    def _events(
        self, cases: list[Case], env: dict[str, str]
    ) -> Iterator[tuple[float, dict[str, Any]]]:
        """What a process tells, each with the seconds since its exec; at last a "fault" if it did
        not end well."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            return
        request = Request(
            args=self._args,
            shape=self._subject.shape,
            cases=cases,
            iterations=self._options.num_iters or self._subject.iterations,
            deadline=self._deadline,
            profile=self._trace_path(),
            is_live=self._subject.is_live,
            is_served=self._subject.is_served,
        )
        read, write = os.pipe()
        begin = time.monotonic()
        command = [sys.executable, "-m", "pelton.bench.suite.child", str(write)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, pass_fds=[write])
        os.close(write)
        assert process.stdin is not None
        try:
            with os.fdopen(read, "rb", buffering=0) as pipe:
                process.stdin.write(request.text().encode())
                process.stdin.close()
                for text in _lines(pipe, self._deadline + _GRACE_SECONDS):
                    yield time.monotonic() - begin, json.loads(text)
            status = process.wait(_GRACE_SECONDS)
            if status:
                yield time.monotonic() - begin, {"fault": f"failed with status {status}"}
        except (TimeoutError, subprocess.TimeoutExpired):
            yield time.monotonic() - begin, {"fault": "did not end in time"}
        finally:
            process.kill()
            process.wait()


def _lines(pipe: Any, deadline: float) -> Iterator[bytes]:
    """Raises TimeoutError at the deadline of time.monotonic."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            data = pipe.read(2**16)
            if not data:
                return
            *whole, rest = (rest + data).split(b"\n")
            yield from whole
