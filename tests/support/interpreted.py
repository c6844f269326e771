"""Triton's interpreter for tests: a module of tests/support, run in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_interpreted(module: str, *args: str) -> None:
    """Triton reads TRITON_INTERPRET when it is imported; the module sets it before."""
    result = subprocess.run(
        [sys.executable, "-m", f"support.{module}", *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
