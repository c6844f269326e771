"""logprobs(logits, token_ids, out_logprobs, out_ranks, out_top_ids, out_top_logprobs)

Log-probabilities under softmax(logits), float32.
logits: [N, V] floating point. token_ids: [N] int32 in [0, V).
out_logprobs: [N] float32, out_ranks: [N] int32, of token_ids; rank = 1 + number of larger logits.
out_top_ids: [N, W] int32, out_top_logprobs: [N, W] float32, 0 <= W <= V: the W most likely tokens,
descending, lowest id first on ties, all distinct; token_ids gets no place of its own among them.
Each row is computed by itself, so its values do not depend on N.
Tolerance: 1e-5 absolute.
"""

from pelton.ops.logprobs.reference import logprobs

__all__ = ["KERNELS", "logprobs"]

KERNELS = {"cuda": "pelton.ops.logprobs.triton:logprobs"}
