"""The loaded kernels: one library, one pool of threads."""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass

from pelton.config.env import cpu_kernels
from pelton.device.native.build import BuildError, build
from pelton.device.native.levels import usable_levels
from pelton.device.native.step_args import ARGUMENTS

_log = logging.getLogger(__name__)

_INT64, _POINTER = ctypes.c_int64, ctypes.c_void_p


class LinearArgs(ctypes.Structure):
    """linear_args of linear.c, field by field."""

    _fields_ = (
        ("x", _POINTER),
        ("out", _POINTER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("norm_weight", _POINTER),
        ("norm_eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("mode", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("use_amx", ctypes.c_int32),
        ("num_rows", _INT64),
        ("num_columns", _INT64),
        ("num_features", _INT64),
        ("x_stride", _INT64),
        ("out_stride", _INT64),
        ("ahead", _POINTER),
        ("ahead_bytes", _INT64),
    )


class DrawArgs(ctypes.Structure):
    """draw_args of linear.h, field by field."""

    _fields_ = (
        ("head", LinearArgs),
        *((name, _POINTER) for name in ("indices", "slots", "seeds", "positions", "temperature")),
        *((name, _POINTER) for name in ("out_ids", "out_status")),
    )


class BlockRun(ctypes.Structure):
    """block_run of blocks.h."""

    _fields_ = (("panels", _POINTER), ("num_panels", _INT64), ("form", _INT64))


MAX_RUNS = 4


class BlockArgs(ctypes.Structure):
    """block_args of blocks.h."""

    _fields_ = (("linear", LinearArgs), ("num_runs", _INT64), ("runs", BlockRun * MAX_RUNS))


class BlockDrawArgs(ctypes.Structure):
    """block_draw_args of blocks.h."""

    _fields_ = (("draw", DrawArgs), ("num_runs", _INT64), ("runs", BlockRun * MAX_RUNS))


class AttentionArgs(ctypes.Structure):
    """attention_args of attention.h, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "out", "lse", "kv", "sinks")),
        *((name, _POINTER) for name in ("query_start_loc", "seq_lens", "block_table")),
        *((name, _INT64) for name in ("num_rows", "num_tokens")),
        *((f"{name}_stride", _INT64) for name in ("query", "out", "block", "table")),
        *((name, _INT64) for name in ("num_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, _INT64) for name in ("window",)),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("kv_kind", ctypes.c_int32),
        ("use_amx", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """level: the instructions it uses. has_amx: whether the system gave this process the tiles."""

    functions: ctypes.CDLL
    level: str
    has_amx: bool

    def set_num_threads(self, count: int) -> None:
        self.functions.pelton_set_num_threads(count)


@functools.cache
def library() -> Library | None:
    """The best library that this machine runs, or None: then the log says why, once."""
    wanted = cpu_kernels()
    if wanted == "off":
        return None
    levels = [level for level in usable_levels() if wanted in ("auto", level.name)]
    reason = f"this CPU has no level {wanted!r}" if wanted != "auto" else "no level for this CPU"
    for level in levels:
        try:
            return _load(str(build(level)), level.name)
        except (BuildError, OSError) as error:
            reason = str(error)
    _log.warning(
        "Kernels for the CPU are not used: %s. torch's serve instead, at about half the speed for "
        "small batches.",
        reason,
    )
    return None


def loaded() -> Library:
    """The library, for kernels that are only chosen where there is one."""
    found = library()
    assert found is not None
    return found


def _load(path: str, level: str) -> Library:
    functions = ctypes.CDLL(path)
    functions.pelton_set_num_threads.argtypes = [ctypes.c_int]
    functions.pelton_linear.argtypes = [ctypes.POINTER(LinearArgs)]
    functions.pelton_draw.argtypes = [ctypes.POINTER(DrawArgs)]
    functions.pelton_attention.argtypes = [ctypes.POINTER(AttentionArgs)]
    functions.pelton_replay.restype = _INT64
    functions.pelton_replay.argtypes = [_POINTER, _INT64]
    for name in ("pelton_blocks", "pelton_block_rows"):
        getattr(functions, name).argtypes = [ctypes.POINTER(BlockArgs)]
    functions.pelton_block_draw.argtypes = [ctypes.POINTER(BlockDrawArgs)]
    functions.pelton_panel_bytes.argtypes = [ctypes.c_int, _INT64]
    functions.pelton_panel_bytes.restype = _INT64
    pack_blocks = functions.pelton_pack_blocks
    pack_blocks.argtypes = [ctypes.c_int, _POINTER, _INT64, _INT64, _INT64, _POINTER]
    pack_blocks.restype = None
    for name, arguments in ARGUMENTS.items():
        getattr(functions, name).argtypes = [ctypes.POINTER(arguments)]
    for name in ("pelton_pack_bf16", "pelton_pack_f32"):
        pack = getattr(functions, name)
        pack.argtypes = [_POINTER, _INT64, _INT64, _INT64, _POINTER]
        pack.restype = None
    functions.pelton_peak_operations.argtypes = [ctypes.c_int]
    functions.pelton_peak_operations.restype = _INT64
    has_amx = level == "amx" and bool(functions.pelton_request_amx())
    return Library(functions=functions, level=level, has_amx=has_amx)
