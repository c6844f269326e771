"""quantise_kv(kv, num_kv_heads, codes): keys and values as codes, with their scales behind them.

kv: [T, 2 * Hk * D], a token's keys then its values. codes: int8, float8_e4m3fn or float8_e5m2.
Returns uint8 [T, 2 * Hk * (D + 2)], new memory: a token's codes [2, Hk, D], then its scales
[2, Hk] in bfloat16. What a token becomes depends on that token alone.

A head x of D numbers becomes codes of x / scale, to the nearest, with scale = max |x| / the largest
code, rounded to bfloat16. No code overflows. Zeros stay zeros. A NaN or an infinity makes NaN of
the whole head when it is read, so the fault stays visible. Bounds of |dequantised - x|, beside
1e-38:

    int8           max |x| / 253
    float8_e4m3fn  |x| / 16 + max |x| / 2^18
    float8_e5m2    |x| / 8 + max |x| / 2^31
"""

from pelton.ops.quantise_kv.reference import quantise_kv

__all__ = ["quantise_kv"]
