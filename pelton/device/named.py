"""From a device's name to the device."""

from __future__ import annotations

import importlib

from pelton.device.protocol import Device
from pelton.device.table import DEVICES


def named_device(name: str, *, num_threads: int | None, staging_mode: str) -> Device:
    """name: "cpu", "cuda", "cuda:N" or "fake", as setup's check has passed it. num_threads: of the
    CPU's kernels; None: as many as torch has.

    Raises ConfigError for a GPU that is not there, and for a staging mode that does not work.
    """
    kind, _, index = name.partition(":")
    module, class_name = DEVICES[kind].split(":")
    device_class = getattr(importlib.import_module(module), class_name)
    if kind == "cuda":
        return device_class(int(index or 0), staging_mode)  # type: ignore[no-any-return]
    if kind == "cpu":
        return device_class(num_threads, staging_mode)  # type: ignore[no-any-return]
    return device_class(staging_mode)  # type: ignore[no-any-return]
