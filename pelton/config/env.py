"""Every environment variable that Pelton reads, typed, in one place."""

from __future__ import annotations

import os

from pelton.errors import ConfigError


def omp_num_threads() -> int | None:
    """OMP_NUM_THREADS: threads for one device's work; None when unset. Of a list ("4,2", one number
    per nesting level) the first counts. Raises ConfigError for anything but a positive number."""
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    first = text.split(",")[0].strip()
    if not (first.isascii() and first.isdigit()) or int(first) < 1:
        raise ConfigError(f"OMP_NUM_THREADS must be a positive number, got {text!r}.")
    return int(first)


def let_openmp_threads_sleep() -> None:
    """OMP_WAIT_POLICY: "passive" unless the user has set it. torch's threads would else spin for a
    millisecond after each of its parallel loops, on cores that our kernels' threads want next: on
    two cores that made prompts of 100 tokens take two to four times as long. OpenMP reads the
    variable when torch is loaded, so this comes before that."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def api_keys() -> str | None:
    """PELTON_API_KEY: keys that clients of the server may send, comma-separated. None: unset."""
    return os.environ.get("PELTON_API_KEY")


def cpu_kernels() -> str:
    """PELTON_CPU_KERNELS: "auto" (default), "off" (torch's kernels only), or the name of one level
    of device/native/levels.py."""
    return os.environ.get("PELTON_CPU_KERNELS", "").strip() or "auto"


def checks_plans() -> bool:
    """PELTON_CHECK_PLANS=1: before every step the ranks compare what they were told to do."""
    return os.environ.get("PELTON_CHECK_PLANS", "").strip() not in ("", "0")
