"""gated_norm(x, gate): x = rms_norm(x * silu(gate)) * weight, in place; of Mamba 2's output.

x: [T, G * S], contiguous; gate: [T, G * S], rows may lie apart. Each of the G groups has a norm of
its own. Weights: weight [G * S]. In float32 (float64 for float64), rounded to x's type before the
weight is multiplied. A row's result depends on that row alone; with batch_invariant in every bit.
Source: arXiv 2405.21060. Tolerance against float64: 1e-5 in float32, 2e-2 in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pelton.ops.recurrent import takes_triton
from pelton.ops.registry import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNormSignature:
    num_groups: int
    group_size: int
    eps: float
    dtype: torch.dtype
    device_type: str
    batch_invariant: bool = False


def _takes_any(signature: GatedNormSignature) -> str | None:
    return None


_PACKAGE = "pelton.ops.gated_norm"
REFERENCE = Candidate("reference", f"{_PACKAGE}.reference:gated_norm", _takes_any)
CANDIDATES = (Candidate("triton", f"{_PACKAGE}.triton:gated_norm", takes_triton), REFERENCE)
