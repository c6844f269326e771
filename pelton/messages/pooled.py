"""Pooled results as bytes."""

from __future__ import annotations

import msgspec
import numpy as np

from pelton.core.plan import Float32Array


class PackedPooled(msgspec.Struct, array_like=True, frozen=True):
    """shape: [D] or [T, D]; values: little-endian float32, row-major."""

    shape: tuple[int, ...]
    values: bytes


def pack_pooled(values: Float32Array) -> PackedPooled:
    return PackedPooled(values.shape, values.astype("<f4", copy=False).tobytes())


def unpack_pooled(packed: PackedPooled) -> Float32Array:
    """A read-only view. Raises ValueError if shape and values do not belong together."""
    return np.frombuffer(packed.values, "<f4").reshape(packed.shape)
