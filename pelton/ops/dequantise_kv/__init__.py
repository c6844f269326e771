"""dequantise_kv(rows, num_kv_heads, head_dim, codes, dtype): quantise_kv's rows back as numbers.

rows: uint8 [..., 2 * Hk * (D + 2)], contiguous. codes: the dtype that they were quantised to.
Returns [..., 2, Hk, D] in `dtype`, new memory: code * scale, exact in float32 and float64, rounded
once in bfloat16 and float16, so numbers within 1/256 of a type's largest may become infinite. Rows
of zero bytes are zeros.
"""

from pelton.ops.dequantise_kv.reference import dequantise_kv

__all__ = ["dequantise_kv"]
