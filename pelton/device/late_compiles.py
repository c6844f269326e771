"""Kernels that are made ready while requests wait for them: none should be."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any


class LateCompiles:
    """Counts Triton's compilations, and what it loads from its cache on disk, from `watch` on; each
    is told to the logger "pelton"."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def watch(self) -> None:
        """Begin. Without Triton there is nothing to compile."""
        if "triton" in sys.modules:
            knobs = importlib.import_module("triton.knobs")
            knobs.runtime.jit_post_compile_hook = self._compiled

    def stop(self) -> None:
        if "triton" in sys.modules:
            importlib.import_module("triton.knobs").runtime.jit_post_compile_hook = None

    def _compiled(self, *, fn: Any, **rest: Any) -> None:
        name = str(getattr(fn, "name", fn))
        self.names.append(name)
        logging.getLogger("pelton").warning(
            "a step waited for the kernel %s to be compiled or loaded (%d so far): it should have "
            "been warm; please report it.",
            name,
            len(self.names),
        )
