"""Facts about a machine, as data: what `setup/resolve.py` decides from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One device, as found at start.

    total_bytes, free_bytes: its memory, container limits included. num_cores: physical CPU cores
    this process may use. fast_bf16, fast_fp16: whether products in that type are computed natively,
    so that it is faster than float32 and not only smaller. host_free_bytes: free memory of the host
    where that is not the device's own, else None. has_cpu_kernels: whether the device is the CPU
    and the library of kernels for it runs here. has_triton: whether the device is an NVIDIA GPU and
    Triton is installed. num_devices: how many of its kind there are.
    """

    kind: Literal["cpu", "cuda", "fake"]
    name: str
    total_bytes: int
    free_bytes: int
    num_cores: int
    fast_bf16: bool
    fast_fp16: bool
    host_free_bytes: int | None = None
    has_cpu_kernels: bool = False
    has_triton: bool = False
    num_devices: int = 1
