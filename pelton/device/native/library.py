"""The loaded kernels: one library, one pool of threads."""

from __future__ import annotations

import ctypes
import functools
import logging
from dataclasses import dataclass

from pelton.config.env import cpu_kernels
from pelton.device.native.build import build
from pelton.device.native.cache import BuildError, MachineError
from pelton.device.native.levels import LEVELS, Level, usable_levels
from pelton.device.native.step_args import ARGUMENTS
from pelton.errors import ConfigError

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
    """The best library that this machine runs, or None: then the log says why, once.
    Raises ConfigError for a PELTON_CPU_KERNELS that cannot be."""
    wanted = cpu_kernels()
    if wanted == "off":
        return None
    failed: dict[str, list[str]] = {}  # levels, by the reason
    for level in _asked_levels(wanted):
        try:
            found = _load(str(build(level)), level.name)
        except (BuildError, OSError, AttributeError) as error:
            failed.setdefault(str(error), []).append(level.name)
            if isinstance(error, MachineError):
                break
            continue
        for reason, names in failed.items():
            _log.warning(
                "CPU kernels of level %s are not used: %s. Level %s serves instead.",
                " and ".join(names),
                reason,
                level.name,
            )
        return found
    _log.warning(
        "Kernels for the CPU are not used: %s. torch's serve instead: a row at a time is some ten "
        "times slower, prompts some three times, and a GGUF file's weights, which they cannot "
        "read in its blocks, take some three times the memory.",
        "; ".join(f"level {' and '.join(names)}: {reason}" for reason, names in failed.items())
        or "no level for this CPU",
    )
    return None


def _asked_levels(wanted: str) -> list[Level]:
    """Best first. Raises ConfigError for a level that is not known, or not this CPU's."""
    usable = usable_levels()
    if wanted == "auto":
        return usable
    known = [level.name for level in LEVELS]
    if wanted not in known:
        raise ConfigError(
            f"PELTON_CPU_KERNELS={wanted!r} is not known; use auto, off, or a level: "
            f"{', '.join(known)}."
        )
    asked = [level for level in usable if level.name == wanted]
    if not asked:
        has = ", ".join(level.name for level in usable) or "none"
        raise ConfigError(
            f"PELTON_CPU_KERNELS={wanted!r} is a level that this CPU does not have; it has {has}."
        )
    return asked


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
