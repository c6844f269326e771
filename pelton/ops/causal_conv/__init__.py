"""causal_conv(x, states, meta, out): silu of a causal convolution of each channel over time.

x: [T, C], rows may lie apart; states: [R, ring, W - 1, C], the last inputs of a sequence, oldest
first; meta: ops/recurrent.py; out: [T, C]. Weights: weight [C, W], the newest input's last; bias
[C] or None. out[t] = silu(bias + sum over j of weight[:, j] * input t - (W - 1) + j), where inputs
before a row's tokens come from its state, and those before its first position are 0. Sums run in
float32 (float64 for float64), in the order of j, so a token does not depend on its chunk; with
batch_invariant not in any bit. Padding tokens get 0 and no state. Source: arXiv 2312.00752.
Tolerance against float64: 1e-6 in float32, 1e-2 in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pelton.ops.recurrent import takes_triton
from pelton.ops.registry import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSignature:
    channels: int
    width: int
    dtype: torch.dtype
    device_type: str
    batch_invariant: bool = False


def _takes_any(signature: ConvSignature) -> str | None:
    return None


_PACKAGE = "pelton.ops.causal_conv"
REFERENCE = Candidate("reference", f"{_PACKAGE}.reference:causal_conv", _takes_any)
CANDIDATES = (Candidate("triton", f"{_PACKAGE}.triton:causal_conv", takes_triton), REFERENCE)
