"""rope(heads, cos, sin): rotate queries and keys in place.

heads: [T, H, D], the query and key heads of a token side by side; the first rotary_dim elements
are rotated as two halves. cos: [T, 1, rotary_dim]; sin: [T, 1, rotary_dim / 2].
Source: arXiv 2104.09864, in the half-split form of GPT-NeoX and Llama.
"""

from pelton.ops.rope.reference import rope

__all__ = ["rope"]
