"""The rotation that a GGUF file describes, in keys and in tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from pelton.checkpoint.gguf_header import GGUFHeader
from pelton.checkpoint.gguf_metadata import Metadata
from pelton.config.model import RopeConfig
from pelton.errors import CheckpointError, UnsupportedError

_ROPE_FREQS = "rope_freqs.weight"
_SHORT_FACTORS = "rope_factors_short.weight"


def read_rope(
    meta: Metadata,
    head_dim: int,
    *,
    allow_partial: bool = False,
    allow_longrope: bool = False,
    truncate: bool = True,
) -> RopeConfig:
    """allow_partial: whether the family rotates a part of each head where the file says so.
    allow_longrope: whether it has tensors of factors. truncate: of YaRN, which no key tells.

    Raises CheckpointError for wrong values, UnsupportedError for a scaling that is not implemented.
    """
    theta = meta.number("rope.freq_base", 10000.0)
    rotary_dim = meta.integer("rope.dimension_count", head_dim)
    if allow_partial:
        if rotary_dim % 2 or rotary_dim > head_dim:
            raise meta.wrong("rope.dimension_count", f"even and at most the head's {head_dim}")
    elif rotary_dim != head_dim:
        raise meta.refused("rope.dimension_count", f"the head dimension, {head_dim}")
    # Before rope.scaling.* there was one key, for linear scaling only.
    old_factor = meta.number("rope.scale_linear", 1.0)
    kind = meta.text("rope.scaling.type", "linear" if old_factor != 1.0 else "none")
    if _SHORT_FACTORS in meta.header.tensors:
        if not allow_longrope or kind not in ("none", "longrope"):
            raise UnsupportedError(
                f"{meta.header.path}: tensor {_SHORT_FACTORS!r} is not supported together with "
                f"{meta.key('rope.scaling.type')}={kind!r} in general.architecture={meta.prefix!r}."
            )
        return _longrope(meta, rotary_dim, theta)
    if kind == "yarn":
        return replace(_yarn(meta, rotary_dim, theta), truncate=truncate)
    if kind not in ("none", "linear"):
        raise meta.refused("rope.scaling.type", "'none', 'linear' or 'yarn'")
    factor = meta.number("rope.scaling.factor", old_factor) if kind == "linear" else 1.0
    if _ROPE_FREQS in meta.header.tensors:
        if factor != 1.0:
            raise UnsupportedError(
                f"{meta.header.path}: {meta.key('rope.scaling.type')}='linear' together with the "
                f"tensor {_ROPE_FREQS!r} is not supported."
            )
        return _llama3_rope(meta.header, rotary_dim, theta)
    if factor == 1.0:
        return RopeConfig(rotary_dim=rotary_dim, theta=theta)
    return RopeConfig(rotary_dim=rotary_dim, theta=theta, kind="linear", factor=factor)


def _yarn(meta: Metadata, rotary_dim: int, theta: float) -> RopeConfig:
    """Keys that would make another attention factor are refused by whoever reads the file."""
    factor = meta.number("rope.scaling.factor")
    fast = meta.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = meta.number("rope.scaling.yarn_beta_slow", 1.0)
    if fast < slow:
        raise meta.wrong("rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow={slow:g}")
    if _ROPE_FREQS in meta.header.tensors:
        raise UnsupportedError(
            f"{meta.header.path}: {meta.key('rope.scaling.type')}='yarn' together with the tensor "
            f"{_ROPE_FREQS!r} is not supported."
        )
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=meta.integer("rope.scaling.original_context_length"),
        attention_factor=1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0,
        beta_fast=fast,
        beta_slow=slow,
    )


def _longrope(meta: Metadata, rotary_dim: int, theta: float) -> RopeConfig:
    """The long factors are for contexts past the original one, where no request gets to."""
    original = meta.integer("rope.scaling.original_context_length")
    return RopeConfig(
        rotary_dim=rotary_dim,
        theta=theta,
        kind="longrope",
        factor=meta.integer("context_length") / original,
        original_max_position=original,
        attention_factor=meta.number("rope.scaling.attn_factor"),
        short_factors=tuple(_factors(meta.header, _SHORT_FACTORS, rotary_dim // 2).tolist()),
    )


def _factors(header: GGUFHeader, name: str, count: int) -> np.ndarray:
    """[count] float32 of a tensor that says how a rotation is scaled."""
    tensor = header.tensors[name]
    if tensor.type.name != "F32" or tensor.shape != (count,):
        raise CheckpointError(
            f"{header.path}: tensor {name!r} must be F32 of shape ({count},), got "
            f"{tensor.type.name} of shape {tensor.shape}."
        )
    found: np.ndarray = np.fromfile(tensor.path, "<f4", count, offset=tensor.start)
    if not (np.isfinite(found) & (found > 0)).all():
        raise CheckpointError(f"{header.path}: tensor {name!r} must hold finite numbers above 0.")
    return found


def _llama3_divisors(
    theta: float, rotary_dim: int, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """[rotary_dim / 2] by how much Llama 3.1 divides each inverse frequency.

    Source: Llama 3.1's reference implementation, `apply_scaling`.
    """
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    # 1 where the wavelength is short (kept), 0 where it is long (divided by the factor).
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    result: np.ndarray = 1.0 / ((1 - smooth) / factor + smooth)
    return result


def _llama3_rope(header: GGUFHeader, rotary_dim: int, theta: float) -> RopeConfig:
    """The scaling whose divisors the file stores as a tensor, recovered and checked.

    Files hold the divisors and not their parameters. All Llama 3.1 to 3.3 checkpoints use
    low_freq_factor 1, high_freq_factor 4 and 8192 positions, and the factor is the largest divisor;
    if these do not give the tensor's values, it is refused.
    """
    divisors = _factors(header, _ROPE_FREQS, rotary_dim // 2)
    factor = float(divisors.max())
    if factor >= 1.0:
        expected = _llama3_divisors(theta, rotary_dim, factor, 1.0, 4.0, 8192)
        if np.allclose(divisors, expected, rtol=1e-4, atol=0.0):
            return RopeConfig(
                rotary_dim=rotary_dim,
                theta=theta,
                kind="llama3",
                factor=factor,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=8192,
            )
    raise UnsupportedError(
        f"{header.path}: tensor {_ROPE_FREQS!r} holds rope factors that are not Llama 3's "
        "(low_freq_factor 1, high_freq_factor 4, 8192 positions) and are not supported."
    )
