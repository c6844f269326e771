"""gumbel_argmax(logits, token_ids, temperature, seeds, positions, out_ids, out_max): a draw.

The id of the largest logit + noise of each row: with Gumbel noise a sample of softmax(logits)
(Gumbel 1954; Maddison, Tarlow and Minka, NeurIPS 2014).

logits: [N, C] float32, already divided by the temperature; -inf = not allowed.
token_ids: [N, C] int32, the token of each column, in any order; None: column = token id.
temperature: [N] float32; a row with 0 gets no noise.
seeds: [N] int64. positions: [N] int32, the index in its request of the token to be drawn.
out_ids: [N] int32, one of the row's token ids whatever the input; the lowest one on ties.
out_max: [N] float32, the winning logit + noise; -inf: nothing is allowed; NaN or +inf if the row
    has NaN.

The noise is a function of (seed, position, token id) and nothing else. So a draw among candidates
gives the token of a draw over the whole vocabulary whose other logits are -inf, and a row's draw
does not depend on its neighbours. The integers are the same on every device; all operations are on
uint32 (the reference: int32 that wraps), `^ * + >>` as in C, constants in reference.py:

    mix(x):   x ^= x >> 16;  x *= M1;  x ^= x >> 13;  x *= M2;  x ^= x >> 16     (murmur3)
    key0    = mix(mix(lo(seed) + position * G) + hi(seed))
    key1    = mix(mix((hi(seed) ^ M1) + position * G) + lo(seed))
    bits    = mix(token * G + key0), with key1 added after mix's first product
    w       = min((float(bits & 0x7fffffff) + 0.5) * 2**-31, 1 - 2**-24)         in (0, 1)
    noise   = -log(-log1p(-w))                                   finite: -2.82 <= noise <= 22.2

w is 1 - u of the usual -log(-log(u)): what decides a draw over many tokens is the upper tail, and
float32 has its fine steps near 0 (2**-32 here, against 2**-24 near 1).
Tolerance: noise 4 float32 ulp between candidates.
"""

from pelton.ops.gumbel_argmax.reference import gumbel_argmax

__all__ = ["KERNELS", "gumbel_argmax"]

KERNELS = {"cuda": "pelton.ops.gumbel_argmax.triton:gumbel_argmax"}
