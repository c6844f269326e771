"""staged_write(arena, writes, num_writes): scatter the host's sparse writes.

arena: [words] int32, changed in place.
writes: [2 * num_writes + 1 + total] int32 = targets [n], cu_lens [n + 1], contents [total]:
    arena[targets[i] : targets[i] + len_i] = contents[cu_lens[i] : cu_lens[i + 1]].
Ranges do not overlap.
"""

from pelton.ops.staged_write.reference import staged_write

__all__ = ["KERNELS", "staged_write"]

KERNELS = {
    "cpu": "pelton.ops.staged_write.cpu:staged_write",
    "cuda": "pelton.ops.staged_write.triton:staged_write",
}
