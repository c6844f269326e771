"""linear(x, out): out = x @ weight.T (+ bias).

x: [T, in_features]; out: [T, out_features], same dtype, given. weight: [out, in]; bias: [out].
Tolerance against float64: 1e-5 relative in float32, 2e-2 in bfloat16.
"""

from __future__ import annotations

from pelton.ops.native_product import takes_native
from pelton.ops.product import takes_any, takes_invariant, takes_single_row
from pelton.ops.registry import Candidate

CANDIDATES = (
    Candidate("packed", "pelton.ops.linear.cpu:packed", takes_native, copies_weight=True),
    Candidate("matvec", "pelton.ops.linear.reference:matvec", takes_single_row, max_rows=1),
    Candidate("reference", "pelton.ops.linear.reference:matmul", takes_any),
    Candidate("tiled", "pelton.ops.linear.reference:tiled", takes_invariant),
)
