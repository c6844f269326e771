"""linear(x, out): out = x @ weight.T (+ bias).

x: [T, in_features]; out: [T, out_features], same dtype, given. weight: [out, in]; bias: [out].
Tolerance against float64: 1e-5 relative in float32, 2e-2 in bfloat16.
"""

from __future__ import annotations

from pelton.ops.native_product import takes_blocks, takes_native
from pelton.ops.product import (
    takes_any,
    takes_invariant,
    takes_single_row,
    takes_triton,
    takes_triton_invariant,
)
from pelton.ops.registry import Candidate

CANDIDATES = (
    Candidate("packed", "pelton.ops.linear.cpu:packed", takes_native, copies_weight=True),
    Candidate("one_row", "pelton.ops.linear.triton:one_row", takes_triton, max_rows=1),
    Candidate("few_rows", "pelton.ops.linear.triton:few_rows", takes_triton, max_rows=64),
    Candidate("fixed", "pelton.ops.linear.triton:fixed", takes_triton_invariant),
    Candidate("matvec", "pelton.ops.linear.reference:matvec", takes_single_row, max_rows=1),
    Candidate("reference", "pelton.ops.linear.reference:matmul", takes_any),
    Candidate("tiled", "pelton.ops.linear.reference:tiled", takes_invariant),
    Candidate("blocks", "pelton.ops.linear.cpu:blocks", takes_blocks, copies_weight=True),
)
