"""top_k_top_p(logits, top_k, top_p, out_values, out_ids): what is left to draw from.

logits: [N, V] float32, already divided by the temperature.
top_k: [N] int32; below 1 counts as 1, V or more = off. top_p: [N] float32; 1 = off.
out_values: [N, C] float32, out_ids: [N, C] int32, 1 <= C <= V: the C largest logits, descending,
with -inf for those that top-k or top-p drops. C must be at least min(top_k, V) of every row.

Order: by value, then lowest id first, -0 = +0. So exactly min(top_k, V) tokens pass top-k, whatever
ties there are, and the choice does not depend on N. Top-p works on the distribution that top-k
left: it keeps the shortest prefix whose probability is at least top_p, and at least one token.
Probabilities are integers, floor(exp(value - max) * 2**40): their sums are the same in every order
of addition, so a row's result is bitwise the same alone, in a batch, and for every C.
Ids are in [0, V) whatever the input; a row with NaN or without a finite logit gives any of them.
Source of top-p: Holtzman et al., arXiv 1904.09751.
"""

from pelton.ops.top_k_top_p.reference import top_k_top_p

__all__ = ["KERNELS", "MAX_CANDIDATES", "top_k_top_p"]

KERNELS = {"cuda": "pelton.ops.top_k_top_p.triton:top_k_top_p"}
# C at most, of the kernels for a GPU.
MAX_CANDIDATES = 256
