"""The kernels' library, compiled on first use and kept per machine.

A library is named by what went into it (sources, options, compiler, CPU flags), so a folder that
several machines share holds one for each, and a change of any makes a new one. What has been made
is tried in a process of its own before anybody loads it: an illegal instruction ends that process
and not the engine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pelton.device.native.levels import Level, cpu_flags

_SOURCES = Path(__file__).parent
_OPTIONS = ("-O3", "-fPIC", "-pthread", "-Wno-psabi")
_TRIAL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.pelton_try())
"""


class BuildError(Exception):
    """Why there is no library, in one sentence."""


def build(level: Level) -> Path:
    """The path of a library that has been tried. Raises BuildError."""
    compiler = _compiler()
    folder = _cache_folder()
    sources = sorted(_SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    for word in (*_OPTIONS, *level.options, compiler, *sorted(cpu_flags())):
        digest.update(word.encode() + b"\0")
    library = folder / f"{level.name}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        _compile(compiler, level, sources, library)
    return library


def _compile(compiler: str, level: Level, sources: list[Path], library: Path) -> None:
    """Make, try, and only then give the library its name: others may look at the same time."""
    handle, unfinished = tempfile.mkstemp(dir=library.parent, suffix=".part")
    os.close(handle)
    try:
        units = [source for source in sources if source.suffix == ".c"]
        with tempfile.TemporaryDirectory() as folder:
            objects = [os.path.join(folder, f"{unit.stem}.o") for unit in units]
            _run_all(
                [
                    [compiler, *_OPTIONS, *level.options, "-c", str(unit), "-o", target]
                    for unit, target in zip(units, objects, strict=True)
                ],
                level,
            )
            link = [compiler, *_OPTIONS, "-shared", *level.options, *objects, "-o", unfinished]
            _run_all([[*link, "-lm"]], level)
        trial = [sys.executable, "-I", "-S", "-c", _TRIAL, unfinished]
        tried = subprocess.run(trial, capture_output=True, timeout=60)
        if tried.returncode:
            raise BuildError(f"kernels of level {level.name} do not run here")
        os.replace(unfinished, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot build kernels of level {level.name}: {error}") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


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
