"""Tokens in order, by value and then id, and where a row's order reaches a goal."""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(2.0**40)
LAST = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**63))


@triton.jit
def keys_of(values):
    """Numbers of at most 32 bits -> uint32 in the same order, -0 = +0."""
    bits = (values.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def ranked(keys, ids):
    """uint32 keys, ids below 2^31 -> int64: larger values come first, of equal ones lower ids."""
    return ((keys ^ 0x80000000).to(tl.int32, bitcast=True).to(tl.int64) << 32) + (LAST - ids)


@triton.jit
def ids_of(rank):
    return LAST - (rank & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def values_of(rank):
    bits = (rank >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mass_of(values, top):
    """A probability as an integer, without the row's sum: int64."""
    return (tl.exp(values - top) * ONE).to(tl.int64)


@triton.jit
def _measure(row, columns, V: tl.constexpr, top, IS_MASS: tl.constexpr):
    """Of a block: keys; and for each 1, or its mass; 0 past the end."""
    inside = columns < V
    values = tl.load(row + columns, mask=inside, other=float("-inf"))
    if IS_MASS:
        measure = mass_of(values, top)
    else:
        measure = tl.zeros_like(columns).to(tl.int64) + 1
    return keys_of(values), tl.where(inside, measure, 0)


@triton.jit
def last_to_reach(row, goal, top, V: tl.constexpr, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above which stands at least `goal` (float64): by its bits, from the
    highest down, two in each pass over the row."""
    key = tl.zeros([], tl.uint32)
    for step in range(16):
        shift = 30 - 2 * step
        one = key + (tl.full([], 1, tl.uint32) << shift)
        two = key + (tl.full([], 2, tl.uint32) << shift)
        three = key + (tl.full([], 3, tl.uint32) << shift)
        sum1 = tl.zeros([BLOCK], tl.int64)
        sum2 = tl.zeros([BLOCK], tl.int64)
        sum3 = tl.zeros([BLOCK], tl.int64)
        for start in range(0, V, BLOCK):
            keys, measure = _measure(row, start + tl.arange(0, BLOCK), V, top, IS_MASS)
            sum1 += tl.where(keys >= one, measure, 0)
            sum2 += tl.where(keys >= two, measure, 0)
            sum3 += tl.where(keys >= three, measure, 0)
        key = tl.where(tl.sum(sum1).to(tl.float64) >= goal, one, key)
        key = tl.where(tl.sum(sum2).to(tl.float64) >= goal, two, key)
        key = tl.where(tl.sum(sum3).to(tl.float64) >= goal, three, key)
    return key


@triton.jit
def last_rank(row, goal, top, V: tl.constexpr, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The rank of the token with which a row's order reaches `goal`, at least 1, in number or in
    mass."""
    last = last_to_reach(row, goal, top, V, IS_MASS, BLOCK)
    above = tl.zeros([BLOCK], tl.int64)
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        keys, measure = _measure(row, start + tl.arange(0, BLOCK), V, top, IS_MASS)
        above += tl.where(keys > last, measure, 0)
        weight = tl.maximum(weight, tl.where(keys == last, measure, 0))
    # How many of those who are equal are needed.
    missing = goal - tl.sum(above).to(tl.float64)
    needed = tl.ceil(missing / tl.maximum(tl.max(weight), 1).to(tl.float64))
    needed = tl.minimum(tl.maximum(needed, 1.0), 1.0 * V).to(tl.int64)
    found = tl.full([], LOWEST, tl.int64)
    seen = tl.zeros([], tl.int64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(row + columns, mask=columns < V, other=float("-inf"))
        keys = keys_of(values)
        ties = ((columns < V) & (keys == last)).to(tl.int64)
        is_last = (ties > 0) & (seen + tl.cumsum(ties, 0) == needed)
        found = tl.maximum(found, tl.max(tl.where(is_last, ranked(keys, columns), LOWEST)))
        seen += tl.sum(ties)
    return found


@triton.jit
def drop_behind(row, columns, V: tl.constexpr, last):
    """-inf for what comes after the rank `last`."""
    inside = columns < V
    values = tl.load(row + columns, mask=inside, other=float("-inf"))
    goes = ranked(keys_of(values), columns) < last
    tl.store(row + columns, float("-inf"), mask=inside & goes)
