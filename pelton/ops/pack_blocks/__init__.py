"""pack_blocks(pool, block_ids, packed): packed[i] = pool[block_ids[i]], bit for bit.
unpack_blocks(pool, block_ids, packed): pool[block_ids[i]] = packed[i].

pool: [num_blocks, ...]. block_ids: [n] int32, each at most once where the pool is written.
packed: [n, ...], the pool's dtype and trailing dimensions, contiguous.
"""

from pelton.ops.pack_blocks.reference import pack_blocks, unpack_blocks

__all__ = ["pack_blocks", "unpack_blocks"]
