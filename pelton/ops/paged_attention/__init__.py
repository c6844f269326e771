"""paged_attention(query, kv, meta, out, lse): causal attention over paged keys and values.

query: [T, Hq, D], rotated. kv: [num_blocks, block_size, 2, Hk, D], or with kv_codes uint8
[num_blocks, block_size, what ops/quantise_kv makes of a token]; this step's keys and values are
already stored, and are read from there. out: [T, Hq, D]; padding tokens get 0. lse: [T, Hq] float32
or None: the natural log of the softmax's denominator, for merging partial results. Query head h
reads key head h * Hk // Hq. Scores s are scaled by `scale`, then, with a softcap c, become
c * tanh(s / c); query token i of a row sees the row's first seq_len - query_len + i + 1 tokens, the
last `window` of them.
sinks: [Hq], with has_sinks: a score per head that joins the softmax's denominator and has no value.
Tolerance against float64 of the stored keys and values: 1e-5 in float32, 2e-2 in bfloat16, or 3e-2
where code * scale is rounded to bfloat16.
Sources: paged KV, arXiv 2309.06180; online softmax, arXiv 1805.02867; softcap, arXiv 2408.00118;
sinks, arXiv 2309.17453.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from pelton.core.plan import Int32Array
from pelton.device.native.library import library
from pelton.ops.registry import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSignature:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device_type: str
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    qk_norm_eps: float | None = None
    """Of the RMS norm over query and key heads before rotation (qkv_attention), or None."""
    kv_codes: torch.dtype | None = None
    """Of quantised keys and values; None: they are stored as `dtype`."""


@dataclass(slots=True, kw_only=True)
class AttentionMetadata:
    """One KV group's view of a batch.

    Device: query_start_loc [B + 1], seq_lens [B], block_table [B, W] int32; kv_slots [T] int64, the
    slot mapping with padding sent to the null block, or, for a store that leaves it out, at -1.
    Host: num_rows live rows; query_lens, seq_len_bounds [num_rows]; seq_len_bounds are the device's
    seq_lens if bounds_are_exact, else upper bounds; the first num_decode_rows rows have one query
    token.
    prepared: what the backend computed once for all layers of the group, on the device.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    kv_slots: torch.Tensor
    num_rows: int
    query_lens: Int32Array
    seq_len_bounds: Int32Array
    bounds_are_exact: bool
    num_decode_rows: int
    prepared: dict[str, Any] = field(default_factory=dict)


def _takes_any(signature: AttentionSignature) -> str | None:
    return None


def _takes_plain(signature: AttentionSignature) -> str | None:
    if signature.softcap is not None:
        return "torch's fused attention has no softcap"
    return "torch's fused attention has no sinks" if signature.has_sinks else None


NATIVE_DTYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
"""The C kernels' numbers for them (device/native/linear.h)."""
_NATIVE_CODES = {torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}


def native_kv_kind(signature: AttentionSignature) -> int:
    """Their number for what stands in a kv slot (device/native/codes.h)."""
    codes = signature.kv_codes
    return NATIVE_DTYPES[signature.dtype] if codes is None else _NATIVE_CODES[codes]


def takes_native(signature: AttentionSignature) -> str | None:
    if signature.device_type != "cpu":
        return "for the CPU"
    if signature.dtype not in NATIVE_DTYPES:
        return f"not in {signature.dtype}"
    return None if library() is not None else "no library of CPU kernels"


_PACKAGE = "pelton.ops.paged_attention"
REFERENCE = (Candidate("reference", f"{_PACKAGE}.reference:paged_attention", _takes_any),)
NATIVE = (Candidate("native", f"{_PACKAGE}.cpu:paged_attention", takes_native),)
# Not the C kernel: whether it gives a token the same bits alone and among others depends on how the
# compiler fuses products and sums (it does with gcc 12, and not with every other).
INVARIANT = (Candidate("invariant", f"{_PACKAGE}.invariant:paged_attention", _takes_any),)
SDPA = (
    Candidate("sdpa", f"{_PACKAGE}.sdpa:paged_attention", _takes_plain),
    Candidate("masked", f"{_PACKAGE}.sdpa:masked_attention", _takes_any),
)
