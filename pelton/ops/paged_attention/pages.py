"""What stands in a kv slot: keys and values as they are, or quantised. Chosen when a layer binds.

Attention reads what was stored, of this step's own tokens too: otherwise a token would see exact
keys of its own chunk and quantised ones before it, and results would depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pelton.ops.dequantise_kv import dequantise_kv
from pelton.ops.dequantise_kv.half import dequantise_fp8
from pelton.ops.paged_attention import AttentionSignature
from pelton.ops.quantise_kv import quantise_kv


def writer(signature: AttentionSignature) -> Callable[[torch.Tensor], torch.Tensor]:
    """From a step's keys and values, [T, 2 * Hk * D], to what store_kv puts into their slots."""
    num_kv_heads, codes = signature.num_kv_heads, signature.kv_codes
    if codes is None:
        return lambda kv: kv
    return lambda kv: quantise_kv(kv, num_kv_heads, codes)


def reader(
    signature: AttentionSignature, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """From gathered slots, [..., what a slot holds], to [..., 2, Hk, D] in `dtype`."""
    num_kv_heads, head_dim, codes = signature.num_kv_heads, signature.head_dim, signature.kv_codes
    if codes is None:
        return lambda slots: slots.to(dtype)
    is_slow = signature.device_type == "cpu" and codes.is_floating_point
    dequantise = dequantise_fp8 if is_slow else dequantise_kv
    return lambda slots: dequantise(slots, num_kv_heads, head_dim, codes, dtype)
