"""row_tokens(fields, tokens, slots, index, out): tokens of requests by their index.

fields, tokens: row state's (ops/step_tensors.py). slots: [N] int64. index, out: [N, W] int32.
out[n, w] is the token at place index[n, w] of the request in row slots[n]: a known token, or the
draft that stands for it behind them; -1 where there is none, or a draft is missing; less than 0
where the prompt has an embedding.
"""

from pelton.ops.row_tokens.reference import row_tokens

__all__ = ["KERNELS", "row_tokens"]

KERNELS = {"cuda": "pelton.ops.row_tokens.triton:row_tokens"}
