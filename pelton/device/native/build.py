"""The kernels' library: the one that the wheel brings for the CPU's level or, in a checkout, one
that is compiled on first use and kept per machine (cache.py).

A library is named by what went into it (sources, options, compiler, CPU flags), so a folder that
several machines share holds one for each, and a change of any makes a new one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pelton.device.native.cache import BuildError, FolderError, MachineError, keep, scratch
from pelton.device.native.levels import Level, cpu_flags

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_PREBUILT = _SOURCES / "prebuilt"  # in a wheel (setup.py)
_OPTIONS = ("-O3", "-fPIC", "-pthread", "-Wno-psabi")
_COMPILE_SECONDS = 180.0
"""For all units of a level. It takes 20 to 60 seconds on two cores that have other work, too."""
_FULL = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)]


def build(level: Level) -> Path:
    """The path of a library that has been tried: brought by the package, or compiled here where
    none came or it does not run (it may be of another C library). Raises BuildError."""
    refusal: BuildError | None = None
    prebuilt = _PREBUILT / _prebuilt_name(level)
    if prebuilt.exists():
        # Nothing in the package is ever written, so what has been tried lies with what is compiled.
        name = f"prebuilt-{level.name}-{_digest((prebuilt.name, *sorted(cpu_flags())))}.so"
        try:
            return keep(name, lambda _: contextlib.nullcontext(prebuilt))
        except MachineError:
            raise
        except BuildError as error:
            refusal = error
    try:
        compiler = _compiler()
    except BuildError as error:
        raise refusal or error from None
    words = (*_OPTIONS, *level.options, compiler, *sorted(cpu_flags()))
    name = f"{level.name}-{_digest(words)}.so"

    @contextlib.contextmanager
    def compiled(kept: Path) -> Iterator[Path]:
        # A warning, so that it shows wherever it is waited for: it may take a minute.
        _log.warning(
            "Compiling the CPU kernels for this machine, once, with %s; kept as %s.", compiler, kept
        )
        with scratch() as folder:
            library = folder / name
            _compile(compiler, level, str(library))
            yield library

    return keep(name, compiled)


def prebuild(level: Level, folder: Path) -> Path:
    """Compile a library for the package that `folder` is of; it is not tried. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _prebuilt_name(level)
    _compile(_compiler(), level, str(library))
    return library


def _prebuilt_name(level: Level) -> str:
    """By its sources, so that what was left from others is not taken for theirs."""
    return f"{level.name}-{_digest((*_OPTIONS, *level.options))}.so"


def _digest(words: Iterable[str]) -> str:
    """Of the sources and whatever else counts."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(source.read_bytes())
    for word in words:
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:16]


def _compile(compiler: str, level: Level, library: str) -> None:
    units = sorted(_SOURCES.glob("*.c"))
    options = [compiler, *_OPTIONS, *level.options]
    deadline = time.monotonic() + _COMPILE_SECONDS
    with scratch() as folder:
        objects = [str(folder / f"{unit.stem}.o") for unit in units]
        commands = [
            [*options, "-c", str(unit), "-o", target]
            for unit, target in zip(units, objects, strict=True)
        ]
        _run_all(commands, level, folder, deadline)
        link = [*options, "-shared", *objects, "-o", library, "-lm"]
        _run_all([link], level, folder, deadline)


def _run_all(commands: list[list[str]], level: Level, folder: Path, deadline: float) -> None:
    """All at once: a unit takes seconds. folder: for the compiler's own files. Raises BuildError
    with the first message."""
    environ = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
    running: list[subprocess.Popen[str]] = []

    def run(command: list[str]) -> tuple[int, str]:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environ,
            process_group=0,  # with the programs that it starts
        )
        running.append(process)
        _, told = process.communicate(timeout=max(deadline - time.monotonic(), 0))
        return process.returncode, told

    compiler = commands[0][0]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for code, told in pool.map(run, commands):
                if code:
                    _refuse(compiler, level, told)
        except subprocess.TimeoutExpired:
            raise MachineError(
                f"{compiler} did not end within {_COMPILE_SECONDS:g} seconds and was stopped"
            ) from None
        except OSError as error:
            raise BuildError(f"cannot run {compiler}: {error}") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def _refuse(compiler: str, level: Level, told: str) -> None:
    lines = told.strip().splitlines()
    full = [line for line in lines if any(text in line for text in _FULL)]
    if full:
        raise FolderError(f"{compiler} cannot write in {tempfile.gettempdir()}: {full[0]}")
    first = ([line for line in lines if "error" in line] or lines or ["no message"])[0]
    raise BuildError(f"{compiler} failed for level {level.name}: {first}")


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise BuildError("no C compiler (install gcc or clang)")
