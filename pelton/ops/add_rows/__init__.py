"""add_rows(x, total): total += x[0], then x[1], and so on, in this order.

x: [n, H] float32; total: [H] float32. One order of additions, so that a sum does not depend on how
its rows were cut into calls.
"""

from pelton.ops.add_rows.reference import add_rows

__all__ = ["KERNELS", "add_rows"]

KERNELS = {"cuda": "pelton.ops.add_rows.triton:add_rows"}
