"""take_rows(table, index, out): out[i] = table[index[i]].

table: [R, N]; index: [T] int32 or int64, in [0, R); out: [T, N] of table's type. Token embeddings,
and rotary rows by position.
"""

from pelton.ops.take_rows.reference import take_rows

__all__ = ["KERNELS", "take_rows"]

KERNELS = {"cpu": "pelton.ops.take_rows.cpu:take_rows"}
