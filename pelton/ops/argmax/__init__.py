"""argmax(logits, out_ids, out_max): each row's largest value and the lowest id that has it.

logits: [N, V] floating point, V >= 1. out_ids: [N] int32. out_max: [N] float32.
A row with NaN gives NaN, or on a GPU +inf, and the id of a NaN; ids are in [0, V) whatever the
input.
`ops.argmax.reference.row_argmax` is the same as an expression, for other references.
"""

from pelton.ops.argmax.reference import argmax

__all__ = ["KERNELS", "argmax"]

KERNELS = {"cuda": "pelton.ops.argmax.triton:argmax"}
