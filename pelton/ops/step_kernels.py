"""Kernels of the ops around a model's layers: chosen once, by the kind of device.

Such an op's package has its reference under the op's name, and may have KERNELS: device type ->
"module:kernel", of the same arguments, for devices that have one of their own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

from pelton.device.native.library import library
from pelton.ops.registry import Kernel

_CAN_RUN: dict[str, Callable[[], bool]] = {
    "cpu": lambda: library() is not None,
    "cuda": lambda: importlib.util.find_spec("triton") is not None,
}


@functools.cache
def step_kernel(op: str, device_type: str) -> Kernel:
    """The kernel of `op` (a package of pelton/ops) for devices of a type: its own where there is
    one that can run here, else the reference."""
    package = importlib.import_module(f"pelton.ops.{op}")
    target = getattr(package, "KERNELS", {}).get(device_type)
    if target is None or not _CAN_RUN[device_type]():
        return getattr(package, op)  # type: ignore[no-any-return]
    module, kernel = target.split(":")
    return getattr(importlib.import_module(module), kernel)  # type: ignore[no-any-return]
