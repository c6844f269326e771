"""linear_add(x, residual): residual += x @ weight.T (+ bias), in place.

x: [T, in_features]; residual: [T, out_features]. Tolerance as for linear.
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
    Candidate("packed", "pelton.ops.linear_add.cpu:packed", takes_native, copies_weight=True),
    Candidate("one_row", "pelton.ops.linear_add.triton:one_row", takes_triton, max_rows=1),
    Candidate("few_rows", "pelton.ops.linear_add.triton:few_rows", takes_triton, max_rows=64),
    Candidate("fixed", "pelton.ops.linear_add.triton:fixed", takes_triton_invariant),
    Candidate("matvec", "pelton.ops.linear_add.reference:matvec", takes_single_row, max_rows=1),
    Candidate("reference", "pelton.ops.linear_add.reference:matmul", takes_any),
    Candidate("tiled", "pelton.ops.linear_add.reference:tiled", takes_invariant),
    Candidate("blocks", "pelton.ops.linear_add.cpu:blocks", takes_blocks, copies_weight=True),
)
