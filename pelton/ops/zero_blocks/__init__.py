"""zero_blocks(pools, block_ids): zero blocks of every pool.

pools: [num_blocks, ...] each, changed in place. block_ids: [n] int32.
"""

from pelton.ops.zero_blocks.reference import zero_blocks

__all__ = ["KERNELS", "zero_blocks"]

KERNELS = {"cpu": "pelton.ops.zero_blocks.cpu:zero_blocks"}
