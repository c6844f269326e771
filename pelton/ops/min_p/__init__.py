"""min_p(logits, threshold): drop tokens much less likely than the best one, in place.

logits: [N, V] float32, already divided by the temperature -> -inf where the token's probability is
below threshold x the largest probability, that is logit < max + log(threshold).
threshold: [N] float32 in [0, 1]; 0 keeps all. The most likely token always stays.
Source: Nguyen et al., arXiv 2407.01082.
"""

from pelton.ops.min_p.reference import min_p

__all__ = ["KERNELS", "min_p"]

KERNELS = {"cuda": "pelton.ops.min_p.triton:min_p"}
