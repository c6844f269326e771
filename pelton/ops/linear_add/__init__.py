"""linear_add(x, residual): residual += x @ weight.T (+ bias), in place.

x: [T, in_features]; residual: [T, out_features]. Tolerance as for linear.
"""

from __future__ import annotations

from pelton.ops.native_product import takes_native
from pelton.ops.product import takes_any, takes_invariant, takes_single_row
from pelton.ops.registry import Candidate

CANDIDATES = (
    Candidate("packed", "pelton.ops.linear_add.cpu:packed", takes_native, copies_weight=True),
    Candidate("matvec", "pelton.ops.linear_add.reference:matvec", takes_single_row, max_rows=1),
    Candidate("reference", "pelton.ops.linear_add.reference:matmul", takes_any),
    Candidate("tiled", "pelton.ops.linear_add.reference:tiled", takes_invariant),
)
