"""keep_top(logits, top_k, top_p): drop what top-k and top-p drop, in place.

logits: [N, V] float32, already divided by the temperature -> -inf where a token is dropped.
top_k: [N] int32, top_p: [N] float32. Which tokens stay: as ops/top_k_top_p says, ties and all; but
nothing is sorted, so it is for many candidates where sorting costs much.
"""

from pelton.ops.keep_top.reference import keep_top

__all__ = ["KERNELS", "keep_top"]

KERNELS = {"cuda": "pelton.ops.keep_top.triton:keep_top"}
