"""What this machine is, and how fast it can possibly read memory and multiply."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pelton
from pelton.device.native import peaks
from pelton.device.native.library import library

_ROUNDS = 5
# Within a core's cache, the last level's share, the embedded model in bfloat16, far beyond.
_READ_MIB = (1, 8, 32, 128, 256, 512)
_CPUINFO = Path("/proc/cpuinfo")
_DRIVER = Path("/proc/driver/nvidia/version")
# Into which `git archive` writes the commit.
_ARCHIVED = Path(__file__).with_name("commit.txt")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A machine and its software. memory_bytes is what the machine has, not what is free;
    l3_bytes is 0 where the system does not say; gpu, driver and triton are "" when no GPU is used.
    """

    cpu: str
    cores: int
    memory_bytes: int
    l3_bytes: int
    gpu: str
    driver: str
    triton: str
    system: str
    python: str
    torch: str
    numpy: str
    pelton: str
    commit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Measured limits of a device at a given thread count.

    read_bytes_per_s: the best of several float32 matrix-vector products over 1 GiB (what a decode
        step does to the weights). flops_per_s: the best of several square products of 2048 (8192 on
        a GPU), in the engine's dtype.
    """

    read_bytes_per_s: float
    flops_per_s: float


def facts(device: torch.device) -> Facts:
    """Facts about this machine as the engine on `device` sees it."""
    has_gpu = device.type == "cuda"
    return Facts(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        l3_bytes=_l3_bytes(),
        gpu=torch.cuda.get_device_name(device) if has_gpu else "",
        driver=_driver() if has_gpu else "",
        triton=_version_of("triton") if has_gpu else "",
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        pelton=pelton.__version__,
        commit=_commit(),
    )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measures with torch's present thread count; takes 1 GiB of the device's memory meanwhile."""
    # Random: a GPU multiplies zeros, or ones, at a power that it does not have for other numbers.
    matrix = torch.rand(2**16, 2**12, device=device)
    vector = torch.rand(2**12, device=device)
    read = matrix.nbytes / _best_seconds(lambda: matrix @ vector, device)
    side = 8192 if device.type == "cuda" else 2048
    square = torch.rand(side, side, device=device).to(dtype)
    flops = 2 * side**3 / _best_seconds(lambda: square @ square, device)
    return Ceilings(read_bytes_per_s=read, flops_per_s=flops)


def cpu_peaks() -> dict[str, Any]:
    """What the CPU's kernels could at most do, by their own threads: bytes read per second by the
    size of what is read over and over, operations per second by the kind of product. {} without
    compiled kernels."""
    kernels = library()
    if kernels is None:
        return {}
    reads = peaks.read_rates(kernels, tuple(size * 2**20 for size in _READ_MIB))
    return {
        "threads": torch.get_num_threads(),
        "read_bytes_per_s": {f"{size >> 20} MiB": rate for size, rate in reads.items()},
        "flops_per_s": peaks.product_rates(kernels),
    }


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(_ROUNDS + 1):  # the first one warms up and can hardly be the best
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def _cpu_name() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    """NVIDIA's version, as its module tells: `NVRM version: NVIDIA UNIX ... 580.95.05  Release`."""
    text = _DRIVER.read_text() if _DRIVER.exists() else ""
    return next((word for word in text.split() if word.replace(".", "").isdigit()), "")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _l3_bytes() -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    for index in _CACHES.glob("index*"):
        if (index / "level").read_text().strip() == "3":
            size = (index / "size").read_text().strip()
            return int(size[:-1]) * units[size[-1]]
    return 0


def _commit() -> str:
    """Commit of the checkout that is running, "+" if files differ from it, or of the archive that
    `git archive` made of one; else ""."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        text = _ARCHIVED.read_text().strip() if _ARCHIVED.exists() else ""
        return "" if text.startswith("$") else text
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def torch_device(name: str) -> torch.device:
    """The torch device behind an engine's device name; the fake device lives in host memory."""
    return torch.device(name if name.startswith("cuda") else "cpu")
