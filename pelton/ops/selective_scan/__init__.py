"""selective_scan(x, dt, b, c, states, meta, out): the recurrence of Mamba 2.

x: [T, H * P]; dt: [T, H]; b, c: [T, G * N]; rows of each may lie apart. states: [R, ring, H, P, N];
meta: ops/recurrent.py; out: [T, H * P]. Weights, each [H]: a_log, d, dt_bias. Head h reads group
h * G // H. Per token, with step = clamp(softplus(dt + dt_bias), *dt_limits):

    state = exp(-exp(a_log) * step) * state + step * x (outer) b
    out = state @ c + d * x

All in float32 (float64 for float64). Padding tokens get 0 and no state. Source: arXiv 2405.21060.
Tolerance against float64, relative to the largest value: 1e-5 in float32, 2e-2 in bfloat16.
The reference goes token by token, with rows together, and a row's bits depend on nothing else.
"chunked" treats runs of tokens as products of matrices (section 6 of the paper), and so does
"triton" without batch_invariant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pelton.ops.recurrent import takes_triton
from pelton.ops.registry import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSignature:
    """dt_limits: least and greatest step."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    dt_limits: tuple[float, float]
    dtype: torch.dtype
    device_type: str
    batch_invariant: bool = False


def _takes_any(signature: ScanSignature) -> str | None:
    return None


def _takes_variant(signature: ScanSignature) -> str | None:
    return "its sums depend on chunk sizes" if signature.batch_invariant else None


_PACKAGE = "pelton.ops.selective_scan"
REFERENCE = Candidate("reference", f"{_PACKAGE}.reference:selective_scan", _takes_any)
CANDIDATES = (
    Candidate("triton", f"{_PACKAGE}.triton:selective_scan", takes_triton),
    Candidate("chunked", f"{_PACKAGE}.chunked:selective_scan", _takes_variant),
    REFERENCE,
)
