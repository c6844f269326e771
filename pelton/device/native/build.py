"""The kernels' library: the one that the wheel brings for the CPU's level or, in a checkout, one
that is compiled on first use and kept per machine.

A library is named by what went into it (sources, options, compiler, CPU flags), so a folder that
several machines share holds one for each, and a change of any makes a new one. What has been made
is tried in a process of its own before anybody loads it: an illegal instruction ends that process
and not the engine.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pelton.device.native.levels import Level, cpu_flags

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_PREBUILT = _SOURCES / "prebuilt"  # in a wheel (setup.py)
_OPTIONS = ("-O3", "-fPIC", "-pthread", "-Wno-psabi")
_TRIAL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.pelton_try())
"""


class BuildError(Exception):
    """Why there is no library, in one sentence."""


def build(level: Level) -> Path:
    """The path of a library that has been tried: brought by the package, or compiled here where
    none came or it does not run (it may be of another C library). Raises BuildError."""
    refusal: BuildError | None = None
    prebuilt = _PREBUILT / _prebuilt_name(level)
    if prebuilt.exists():
        try:
            return _install(prebuilt, level)
        except BuildError as error:
            refusal = error
    try:
        compiler = _compiler()
    except BuildError as error:
        raise refusal or error from None
    words = (*_OPTIONS, *level.options, compiler, *sorted(cpu_flags()))
    library = _cache_folder() / f"{level.name}-{_digest(words)}.so"
    if not library.exists():
        # A warning, so that it shows wherever it is waited for: it may take a minute.
        _log.warning(
            "Compiling the CPU kernels for this machine, once, with %s; kept as %s.",
            compiler,
            library,
        )
        _finish(library, level, lambda unfinished: _compile(compiler, level, unfinished))
    return library


def prebuild(level: Level, folder: Path) -> Path:
    """Compile a library for the package that `folder` is of; it is not tried. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _prebuilt_name(level)
    _compile(_compiler(), level, str(library))
    return library


def _install(prebuilt: Path, level: Level) -> Path:
    """Nothing in the package is ever written, so what has been tried lies with what is compiled."""
    words = (prebuilt.name, *sorted(cpu_flags()))
    library = _cache_folder() / f"prebuilt-{level.name}-{_digest(words)}.so"
    if not library.exists():
        _finish(library, level, lambda unfinished: shutil.copyfile(prebuilt, unfinished))
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


def _finish(library: Path, level: Level, make: Callable[[str], object]) -> None:
    """Make, try, and only then give the library its name: others may look at the same time."""
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".part")
    os.close(handle)
    try:
        make(unfinished)
        trial = [sys.executable, "-I", "-S", "-c", _TRIAL, unfinished]
        tried = subprocess.run(trial, capture_output=True, timeout=60)
        if tried.returncode:
            raise BuildError(f"kernels of level {level.name} do not run here")
        os.replace(unfinished, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot build kernels of level {level.name}: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _compile(compiler: str, level: Level, library: str) -> None:
    units = sorted(_SOURCES.glob("*.c"))
    options = [compiler, *_OPTIONS, *level.options]
    try:
        with tempfile.TemporaryDirectory() as folder:
            objects = [os.path.join(folder, f"{unit.stem}.o") for unit in units]
            commands = [
                [*options, "-c", str(unit), "-o", target]
                for unit, target in zip(units, objects, strict=True)
            ]
            _run_all(commands, level)
            _run_all([[*options, "-shared", *objects, "-o", library, "-lm"]], level)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot build kernels of level {level.name}: {error}") from error


def _run_all(commands: list[list[str]], level: Level) -> None:
    """All at once: a unit takes seconds. Raises BuildError with the first message."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(run, commands):
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                told = [line for line in lines if "error" in line] or lines or ["no message"]
                raise BuildError(f"{commands[0][0]} failed for level {level.name}: {told[0]}")


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        path = shutil.which(name) if name else None
        if path is not None:
            return path
    raise BuildError("no C compiler (install gcc or clang)")


def _cache_folder() -> Path:
    """A folder that nobody else may write in: what lies there is run."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    user = os.getuid()
    for folder in (Path(base, "pelton"), Path(tempfile.gettempdir(), f"pelton-{user}")):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = folder.stat()
            if facts.st_uid == user and not facts.st_mode & 0o022 and os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    raise BuildError(f"no folder for compiled kernels can be written ({base})")
