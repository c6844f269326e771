"""What this host offers a CPU engine: memory and cores, container limits included. No torch."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from pelton.config.hardware import DeviceFacts

_ROOT = Path("/")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _fields(path: Path) -> dict[str, int]:
    """`name value` or `name: value kB` lines; values in the file's unit."""
    fields = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1])
    return fields


def _number(path: Path) -> int | None:
    """None for a missing file, and for "max" and "-1", which mean no limit."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _cgroups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of this process's cgroups for `controller`, innermost first, to the root:
    each one's limit counts. Inside a container the path that the kernel tells may not exist under
    its mount; what does exist of it is used.

    Source: man 7 cgroups; /proc/self/cgroup lines are `hierarchy:controllers:path`.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        folder = Path(path.strip("/"))
        for inner in (folder, *folder.parents):
            if ".." not in inner.parts and (mount / inner).is_dir():
                yield version, mount / inner


def _cgroup_memory(version: int, folder: Path) -> tuple[int, int] | None:
    """(limit, free) in bytes, or None without a limit. File cache counts as free: the kernel gives
    it up before it refuses memory."""
    stat = _fields(folder / "memory.stat")
    if version == 2:
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
    else:
        limit = _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.usage_in_bytes")
        cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    if limit is None or used is None:
        return None
    return limit, max(limit - max(used - cache, 0), 0)


def cpu_memory(root: Path = _ROOT) -> tuple[int, int]:
    """(total, free) bytes of host memory that this process may use: the least of the machine's and
    of each enclosing cgroup's (v1 and v2).

    Outside Linux the free part is not known without further packages, and half the total is taken.
    root: where /proc and /sys are mounted.
    """
    info = _fields(root / "proc/meminfo")
    if "MemTotal" in info:
        total = info["MemTotal"] * 1024
        free = info.get("MemAvailable", info.get("MemFree", 0)) * 1024
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        free = total // 2
    for version, folder in _cgroups("memory", root):
        if (limits := _cgroup_memory(version, folder)) is not None:
            total, free = min(total, limits[0]), min(free, limits[1])
    return total, free


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cpu_quota(root: Path) -> float:
    """CPUs' worth of time that the cgroups grant; infinite without a limit."""
    quota = math.inf
    for version, folder in _cgroups("cpu", root):
        if version == 2:
            words = _text(folder / "cpu.max").split()
            granted = int(words[0]) if words and words[0].isdigit() else None
            period = int(words[1]) if len(words) > 1 else 100_000
        else:
            granted = _number(folder / "cpu.cfs_quota_us")
            period = _number(folder / "cpu.cfs_period_us") or 100_000
        if granted is not None:
            quota = min(quota, granted / period)
    return quota


def physical_cores(root: Path = _ROOT) -> int:
    """Cores that this process may use, at least 1: two hardware threads of a core count once;
    affinity and the cgroups' CPU quotas are respected."""
    cores = set()
    for cpu in _allowed_cpus():
        siblings = _text(
            root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        ).strip()
        cores.add(siblings or str(cpu))
    return max(1, min(len(cores), math.ceil(min(_cpu_quota(root), 1e9))))


def _cpu_flags_and_name(root: Path) -> tuple[set[str], str]:
    flags: set[str] = set()
    name = ""
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags" and not flags:
            flags = set(value.split())
        elif key.strip() == "model name" and not name:
            name = value.strip()
    return flags, name or platform.processor() or platform.machine()


def cpu_facts(root: Path = _ROOT) -> DeviceFacts:
    """The host as a device. Fast half-precision products are known on x86 only, from the CPU's
    flags; elsewhere they are taken to be absent."""
    flags, name = _cpu_flags_and_name(root)
    total, free = cpu_memory(root)
    return DeviceFacts(
        kind="cpu",
        name=name,
        total_bytes=total,
        free_bytes=free,
        num_cores=physical_cores(root),
        fast_bf16=bool(flags & {"avx512_bf16", "amx_bf16"}),
        fast_fp16=bool(flags & {"avx512_fp16", "amx_fp16"}),
    )
