"""What the kernels may use of this CPU."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Level:
    """A set of instructions. needs: as /proc/cpuinfo calls them, where the kernel lists what it
    lets programs use. options: for the compiler."""

    name: str
    machine: str
    needs: tuple[str, ...]
    options: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_AMX = (*_BF16, "amx_tile", "amx_bf16")
_SPELLING = {
    "avx512_vnni": "avx512vnni",
    "avx512_bf16": "avx512bf16",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
}


def _x86(name: str, needs: tuple[str, ...]) -> Level:
    options = tuple(f"-m{_SPELLING.get(flag, flag)}" for flag in needs)
    return Level(name, "x86_64", needs, options)


LEVELS = (
    _x86("amx", _AMX),
    _x86("avx512_bf16", _BF16),
    _x86("avx512", _AVX512),
    _x86("avx2", _AVX2),
    Level("neon", "aarch64", (), ()),
)
"""Best first."""


def cpu_flags() -> frozenset[str]:
    """Instruction sets that the CPU has and the system allows; empty where nobody says."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable_levels() -> list[Level]:
    """Best first; empty where no level is known to run."""
    machine, flags = platform.machine(), cpu_flags()
    return [level for level in LEVELS if level.machine == machine and flags.issuperset(level.needs)]
