"""advance(rows, step, sampled, num_sampled): move row state past a step, on the device.

rows, step: as in ops/step_tensors.py; rows is changed in place.
sampled: [B, 1 + K] int32; num_sampled: [B] int32, tokens kept of each row (0 in mid-prefill).
Per live row: the kept tokens are appended to the token table, total_len grows by their number,
num_computed by the query length less the rejected drafts, and the newest token is the next input.
Padding rows change nothing but the reserved row.
"""

from pelton.ops.advance.reference import advance

__all__ = ["KERNELS", "advance"]

KERNELS = {
    "cpu": "pelton.ops.advance.cpu:advance",
    "cuda": "pelton.ops.advance.triton:advance",
}
