"""Which batch row a token is of: what several kernels ask."""

from __future__ import annotations

import triton
import triton.language as tl


def num_bits(num_rows: int) -> int:
    """Steps of `row_of`."""
    return (num_rows - 1).bit_length()


@triton.jit
def row_of(cumulative, place, num_rows, num_bits):
    """Of each place of the block `place`, the last row that begins at or before it. cumulative:
    where rows begin, of which there are at least one."""
    row = tl.zeros_like(place)
    for bit in range(num_bits):
        further = row + (1 << (num_bits - 1 - bit))
        begins = tl.load(cumulative + further, mask=further < num_rows, other=2**31 - 1)
        row = tl.where(begins <= place, further, row)
    return row
