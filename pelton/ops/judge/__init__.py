"""judge(raw_max, out_max, out_ids, out_status): what is to be said of rows that were drawn.

raw_max: [N] float32, the largest logit before any mask; out_max: [N] float32, the score of what
was drawn.
out_status: [N] int32, OK, ALL_MASKED where the score is -inf, or NAN_LOGITS where either is NaN or
+inf. out_ids: [N] int32, 0 where the status is not OK.
"""

from pelton.ops.judge.reference import judge

__all__ = ["KERNELS", "judge"]

KERNELS = {"cuda": "pelton.ops.judge.triton:judge"}
