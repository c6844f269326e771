"""A Triton kernel in a file of its own: triton reads the source."""

import triton
import triton.language as tl


@triton.jit
def add_one(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 1)


@triton.jit
def add_two(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) + 2)
