"""The noise of the contract, for kernels that draw."""

from __future__ import annotations

import triton
import triton.language as tl

M1 = tl.constexpr(0x85EBCA6B)
M2 = tl.constexpr(0xC2B2AE35)
G = tl.constexpr(0x9E3779B1)


@triton.jit
def _mix(x):
    """murmur3's finaliser."""
    x ^= x >> 16
    x *= M1
    x ^= x >> 13
    x *= M2
    return x ^ (x >> 16)


@triton.jit
def row_keys(seeds, positions):
    """seeds: int64, positions: int32 -> two uint32."""
    low = (seeds & 0xFFFFFFFF).to(tl.uint32)
    high = (seeds >> 32).to(tl.uint32)
    step = positions.to(tl.uint32) * G
    key0 = _mix(_mix(low + step) + high)
    key1 = _mix(_mix((high ^ M1) + step) + low)
    return key0, key1


@triton.jit
def two_atanh(s):
    """2 atanh(s) = log((1 + s) / (1 - s)), |s| <= 1/3, to float32's last bits."""
    q = s * s
    p = q * (1.0 / 15) + 1.0 / 13
    p = q * p + 1.0 / 11
    p = q * p + 1.0 / 9
    p = q * p + 1.0 / 7
    p = q * p + 1.0 / 5
    p = q * p + 1.0 / 3
    return 2 * (s + s * (q * p))


@triton.jit
def _log(x):
    """Of normal float32, near 1 as exact as elsewhere: the hardware's own is not."""
    bits = x.to(tl.int32, bitcast=True)
    # mantissa in [sqrt(1/2), sqrt(2))
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32) * 0.6931471805599453 + two_atanh((m - 1) / (m + 1))


@triton.jit
def gumbel_noise(token_ids, key0, key1):
    """token_ids: int32; keys that broadcast with them -> float32."""
    x = token_ids.to(tl.uint32) * G + key0
    x ^= x >> 16
    x = x * M1 + key1
    x ^= x >> 13
    x *= M2
    x ^= x >> 16
    w = (x & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    w = tl.minimum((w + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    # -log(1 - w); 1 - w is exact above 1/2
    half = tl.minimum(w, 0.5)
    small = two_atanh(half / (2 - half))
    large = -_log(1 - tl.maximum(w, 0.5))
    return -_log(tl.where(w <= 0.5, small, large))
