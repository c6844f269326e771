"""Where compiled kernels are kept from one start to the next.

Only what has been tried is ever loaded. A trial is a process of its own, so that an illegal
instruction or a file that was cut short ends that process and not the engine. Beside a library lies
the checksum of the bytes that were tried (`.sha256`): other bytes are made anew, and a library
without one is tried again. Files come into being under their names by renaming, one process at a
time (`lock`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

_log = logging.getLogger(__name__)

_TRIAL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
sys.exit(library.pelton_try())
"""
_TRIAL_SECONDS = 60
_SCRATCH = "pelton-kernels-"
_SCRATCH_SECONDS = 600
"""Nobody works in a scratch folder for that long: its process was killed."""


class BuildError(Exception):
    """Why there is no library, in one sentence without its full stop."""


class MachineError(BuildError):
    """What is wrong would be so for every level: a folder, or a compiler that hangs."""


class FolderError(MachineError):
    """A folder cannot be used."""


def keep(name: str, make: Callable[[Path], AbstractContextManager[Path]]) -> Path:
    """The path of the library called `name`, which has been tried.

    make: called if there is none: told where it is to be kept, gives the path of a new one.
    Raises BuildError.
    """
    folders = _folders()
    for folder in folders:
        library = folder / name
        if library.exists() and _why_unproven(library) is None:
            return library
    with _lock(folders):
        for folder in folders:
            library = folder / name
            if not library.exists():
                continue
            reason = _why_unproven(library)
            if reason is None:  # whoever held the lock has made it
                return library
            _log.warning("%s is removed and made anew: %s.", library, reason)
            with contextlib.suppress(OSError):
                library.unlink()
        with make(folders[0] / name) as made:
            return _install(made, name, folders)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for what nobody needs afterwards. Raises FolderError."""
    try:
        for left in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
            facts = left.lstat()
            if facts.st_uid == os.getuid() and facts.st_mtime < time.time() - _SCRATCH_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix=_SCRATCH)
    except OSError as error:
        raise FolderError(f"cannot write in the folder for temporary files: {error}") from error
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _install(made: Path, name: str, folders: list[Path]) -> Path:
    """Into the first folder that takes it."""
    refusals = []
    for folder in folders:
        try:
            with _writing(folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = _why_unsafe(folder)
            if reason is not None:
                raise FolderError(reason)
            return _put(made, folder / name)
        except FolderError as error:
            _log.warning("Compiled kernels are not kept in %s: %s.", folder, error)
            refusals.append(str(error))
    raise FolderError(f"no folder takes compiled kernels: {'; '.join(refusals)}")


def _put(made: Path, library: Path) -> Path:
    """Tried where it will lie: a folder may be one that nothing is run from."""
    with _writing(library.parent):
        for left in library.parent.glob("*.part"):  # by processes that were killed
            left.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=library.parent, suffix=".part")
        os.close(handle)
    part = Path(name)
    try:
        with _writing(library.parent):
            shutil.copyfile(made, part)
        _try(part)
        with _writing(library.parent):
            _proof(library).unlink(missing_ok=True)
            os.replace(part, library)
        _prove(library)
    finally:
        part.unlink(missing_ok=True)
    return library


def _try(library: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TRIAL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"kernels cannot be tried here: {error}") from error
    if tried.returncode < 0:
        raise BuildError(f"kernels do not run here: {signal.strsignal(-tried.returncode)}")
    if tried.returncode:
        told = tried.stderr.strip().splitlines() or ["they compute wrong numbers"]
        raise BuildError(f"kernels do not run here: {told[-1]}")


def _why_unproven(library: Path) -> str | None:
    """None: these are the bytes that were tried, or they have been now."""
    try:
        if _proof(library).exists():
            if _proof(library).read_text() == _checksum(library):
                return None
            return "its bytes are not those that were tried"
        _try(library)
    except (OSError, BuildError) as error:
        return str(error)
    _prove(library)
    return None


def _prove(library: Path) -> None:
    # Where it cannot be written down, the next start tries again.
    with contextlib.suppress(OSError):
        handle, part = tempfile.mkstemp(dir=library.parent, suffix=".part")
        try:
            with open(handle, "w") as file:
                file.write(_checksum(library))
            os.replace(part, _proof(library))
        finally:
            Path(part).unlink(missing_ok=True)


def _proof(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


@contextlib.contextmanager
def _lock(folders: list[Path]) -> Iterator[None]:
    """One at a time makes a library: a second start waits for the first one's."""
    file = None
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = (folder / "lock").open("a")
            _wait_for(file.fileno(), folder)
            break
        except OSError:  # a folder that cannot be written, or a file system without locks
            continue
    # Without any lock two may compile at once, and either's result is right.
    with file or contextlib.nullcontext():
        yield


def _wait_for(file: int, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.warning("Waiting for another process, which makes the CPU kernels in %s.", folder)
        fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"{folder}: {error.strerror or error}") from error


def _folders() -> list[Path]:
    """Best first. What lies there is run, so nobody else may write there."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folders = [Path(base, "pelton")]
    with contextlib.suppress(OSError):  # none can be written
        folders.append(Path(tempfile.gettempdir(), f"pelton-{os.getuid()}"))
    safe, reasons = [], []
    for folder in folders:
        reason = _why_unsafe(folder)
        if reason is None:
            safe.append(folder)
            continue
        reasons.append(reason)
        _tell_unsafe(folder, reason)
    if not safe:
        raise FolderError(f"no folder for compiled kernels is safe: {'; '.join(reasons)}")
    return safe


@functools.cache
def _tell_unsafe(folder: Path, reason: str) -> None:
    _log.warning("Compiled kernels are neither read from nor kept in %s: %s.", folder, reason)


def _why_unsafe(folder: Path) -> str | None:
    """The parent counts, too: who may write there can put another folder in this one's place.
    What is not there yet is safe."""
    for place in (folder.parent, folder):
        try:
            facts = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{place}: {error.strerror}"
        owner = _user_name(facts.st_uid)
        if place == folder and facts.st_uid != os.getuid():
            return f"{place} belongs to {owner} and not to {_user_name(os.getuid())}"
        writers = stat.S_IWOTH | stat.S_IWGRP if place == folder else stat.S_IWOTH
        # With the sticky bit, as /tmp has, nobody renames what is another's.
        is_sticky = place != folder and facts.st_mode & stat.S_ISVTX
        if facts.st_mode & writers and not is_sticky:
            return f"others than its owner {owner} may write in {place}"
    return None


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
