"""What this CPU can do at most, measured by the threads that the kernels run on."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import torch

from pelton.device.native.calls import call
from pelton.device.native.library import Library

_INT64 = ctypes.c_int64
_LINE = 64
_ROUNDS = 5
_SECONDS = 0.02
"""About how long each measurement takes."""

# In the order of peaks.h.
KINDS = ("float32", "bf16_dot", "bf16_tile")


class _ReadArgs(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("num_bytes", _INT64), ("rounds", _INT64))


class _PeakArgs(ctypes.Structure):
    _fields_ = (("count", _INT64), ("kind", ctypes.c_int32))


def read_rates(library: Library, sizes: tuple[int, ...]) -> dict[int, float]:
    """Bytes per second that all threads together read, by the bytes that they read over and over.
    Sizes are multiples of 64."""
    memory = torch.ones(max(sizes), dtype=torch.uint8)
    rates = {}
    for size in sizes:
        assert size % _LINE == 0
        rounds = max(1, round(_SECONDS * 20e9 / size))
        args = _ReadArgs(memory.data_ptr(), size, rounds)
        seconds = _best(functools.partial(call, library.functions.pelton_read, args))
        rates[size] = size * rounds / seconds
    return rates


def product_rates(library: Library) -> dict[str, float]:
    """Operations per second of all threads together, by the kind of product (KINDS); of kinds that
    the library has."""
    operations = library.functions.pelton_peak_operations
    rates = {}
    for number, kind in enumerate(KINDS):
        of_one = operations(number)
        if not of_one or (kind == "bf16_tile" and not library.has_amx):
            continue
        count = round(_SECONDS * 1e8)
        args = _PeakArgs(count, number)
        seconds = _best(functools.partial(call, library.functions.pelton_peak, args))
        threads = library.functions.pelton_num_threads()
        rates[kind] = threads * count * of_one / seconds
    return rates


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begin)
    return best
