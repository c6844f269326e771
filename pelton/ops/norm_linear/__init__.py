"""norm_linear(x, out, scratch): out = activation(rms_norm(x) @ weight.T (+ bias)).

x: [T, in_features], the residual stream, not changed. out: [T, out_features], or half as wide where
the activation halves. scratch: [T, out_features], given where it does, else `out`.
norm_weight: [in_features], with norm_eps; without it nothing is normed. The norm is computed in
float32 (float64 for float64 input), as Llama does. Sources: RMS norm, arXiv 1910.07467; SwiGLU and
GeGLU, arXiv 2002.05202; GELU, arXiv 1606.08415. Tolerance as for linear.
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
    Candidate("packed", "pelton.ops.norm_linear.cpu:packed", takes_native, copies_weight=True),
    Candidate("one_row", "pelton.ops.norm_linear.triton:one_row", takes_triton, max_rows=1),
    Candidate("few_rows", "pelton.ops.norm_linear.triton:few_rows", takes_triton, max_rows=64),
    Candidate("many_rows", "pelton.ops.norm_linear.triton:many_rows", takes_triton),
    Candidate("fixed", "pelton.ops.norm_linear.triton:fixed", takes_triton_invariant),
    Candidate("matvec", "pelton.ops.norm_linear.reference:matvec", takes_single_row, max_rows=1),
    Candidate("reference", "pelton.ops.norm_linear.reference:matmul", takes_any),
    Candidate("tiled", "pelton.ops.norm_linear.reference:tiled", takes_invariant),
    Candidate("blocks", "pelton.ops.norm_linear.cpu:blocks", takes_blocks, copies_weight=True),
)
