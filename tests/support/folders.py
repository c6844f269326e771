"""Folders for what is made once and used by many tests; they are gone when the process ends."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path


def new_folder(name: str) -> Path:
    """An empty one, whose name begins with `name`."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root(os.getpid())))


@functools.cache
def _root(pid: int) -> Path:
    """Of this process: a fork makes one of its own, and leaves its parent's alone."""
    root = Path(tempfile.mkdtemp(prefix="pelton-tests-"))

    def remove() -> None:
        if os.getpid() == pid:
            shutil.rmtree(root, ignore_errors=True)

    atexit.register(remove)
    return root
