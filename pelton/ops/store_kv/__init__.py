"""store_kv(kv, pool, kv_slots): put a step's keys and values into their slots.

kv: [T, N], a token's keys then its values, or what quantise_kv made of them. pool:
[num_blocks * block_size, N] of the same type.
kv_slots: [T] int64, >= 0; padding tokens point into the null block.
"""

from pelton.ops.store_kv.reference import store_kv

__all__ = ["store_kv"]
