"""bidirectional_attention(qkv, cos, sin, meta, out): every token sees all tokens of its request.

All tokens of a request are in this step: nothing is stored, and keys and values are read from the
qkv product. qkv: [T, (Hq + 2 * Hk) * D]: queries, keys, values; changed in place where they are
normed and rotated. cos, sin: as for rope, where rotary_dim is not 0, else None. out: [T, Hq * D];
padding tokens get 0. Query head h reads key head h * Hk // Hq. Scores are scaled by `scale`; with a
window w token i sees tokens i - w to i + w. Weights: q_norm, k_norm [D] with qk_norm_eps.

Tolerance against float64: 1e-5 in float32, 2e-2 in bfloat16. A token's result does not depend on
other requests, nor on the place of its own in the batch.
Sources: arXiv 1706.03762; windows of encoders, arXiv 2412.13663.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from pelton.core.plan import Int32Array
from pelton.device.native.library import library
from pelton.ops.paged_attention import NATIVE_DTYPES
from pelton.ops.registry import Candidate

_MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class BidirectionalSignature:
    """window: tokens that are seen on each side, or None for all. rotary_dim: elements of a head
    that are rotated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device_type: str
    window: int | None = None
    rotary_dim: int = 0
    qk_norm_eps: float | None = None
    batch_invariant: bool = False


@dataclass(slots=True, kw_only=True)
class BidirectionalMetadata:
    """A step's requests. Device: query_start_loc [B + 1] int32. Host: num_rows live rows, their
    query_lens [num_rows] (which are their lengths), max_query_len of the shape."""

    query_start_loc: torch.Tensor
    num_rows: int
    query_lens: Int32Array
    max_query_len: int


def _takes_native(signature: BidirectionalSignature) -> str | None:
    if signature.device_type != "cpu":
        return "for the CPU"
    if signature.dtype not in NATIVE_DTYPES:
        return f"not in {signature.dtype}"
    if signature.batch_invariant:
        return "whether its bits depend on the batch is the compiler's matter"
    if signature.head_dim > 2 * _MAX_HEAD_DIM:
        return f"heads of more than {2 * _MAX_HEAD_DIM} elements"
    return None if library() is not None else "no library of CPU kernels"


def _takes_triton(signature: BidirectionalSignature) -> str | None:
    if signature.device_type != "cuda":
        return "for NVIDIA GPUs"
    if signature.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"not in {signature.dtype}"
    if signature.head_dim > _MAX_HEAD_DIM:
        return f"head_dim is above {_MAX_HEAD_DIM}"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _takes_any(signature: BidirectionalSignature) -> str | None:
    return None


_PACKAGE = "pelton.ops.bidirectional_attention"
CANDIDATES = (
    Candidate("native", f"{_PACKAGE}.cpu:bidirectional_attention", _takes_native),
    Candidate("triton", f"{_PACKAGE}.triton:bidirectional_attention", _takes_triton),
    Candidate("reference", f"{_PACKAGE}.reference:bidirectional_attention", _takes_any),
)
