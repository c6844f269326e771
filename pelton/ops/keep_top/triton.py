"""The last token that stays is found by its bits, from the highest down, two at a time: how much
stands at or above a value is counted in one pass over the row. A program has a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096
_ONE = tl.constexpr(2.0**40)


@triton.jit
def keys_of(values):
    """Numbers of at most 32 bits -> uint32 in the same order, -0 = +0."""
    bits = (values.to(tl.float32) + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _measure(row, columns, V: tl.constexpr, top, IS_MASS: tl.constexpr):
    """Of a block: keys; and for each 1, or its probability as an integer; 0 past the end."""
    inside = columns < V
    values = tl.load(row + columns, mask=inside, other=float("-inf"))
    if IS_MASS:
        measure = (tl.exp(values - top) * _ONE).to(tl.int64)
    else:
        measure = tl.zeros_like(columns).to(tl.int64) + 1
    return keys_of(values), tl.where(inside, measure, 0)


@triton.jit
def last_to_reach(row, goal, top, V: tl.constexpr, IS_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key at or above which stands at least `goal` (float64)."""
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
def _around(row, key, top, V: tl.constexpr, BLOCK: tl.constexpr):
    """Above a key: how many, and their mass; at it: how many, and the mass of one."""
    above = tl.zeros([BLOCK], tl.int64)
    mass_above = tl.zeros([BLOCK], tl.int64)
    equal = tl.zeros([BLOCK], tl.int64)
    weight = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        keys, measure = _measure(row, columns, V, top, True)
        inside = columns < V
        above += (inside & (keys > key)).to(tl.int64)
        mass_above += tl.where(keys > key, measure, 0)
        equal += (inside & (keys == key)).to(tl.int64)
        weight = tl.maximum(weight, tl.where(keys == key, measure, 0))
    return tl.sum(above), tl.sum(mass_above), tl.sum(equal), tl.max(weight)


@triton.jit
def _keep_top(logits, top_k, top_p, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    row = logits + tl.program_id(0).to(tl.int64) * stride
    k = tl.maximum(tl.load(top_k + tl.program_id(0)), 1)
    p = tl.load(top_p + tl.program_id(0))
    if (k >= V) & (p >= 1):
        return
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(row + columns, mask=columns < V, other=float("-inf")))
    top = tl.max(best)
    # The last key that stays, and how many of those who have it.
    last = tl.zeros([], tl.uint32)
    room = tl.full([], V, tl.int64)
    if k < V:
        last = last_to_reach(row, k.to(tl.float64), top, V, False, BLOCK)
    above, mass_above, equal, weight = _around(row, last, top, V, BLOCK)
    if k < V:
        room = k - above
    mass = mass_above + tl.minimum(room, equal) * weight
    if p < 1:
        # The best token stays even at top_p 0.
        goal = tl.maximum(mass.to(tl.float64) * p.to(tl.float64), 1.0)
        last_p = last_to_reach(row, goal, top, V, True, BLOCK)
        # Past what top-k left nothing counts.
        last_p = tl.maximum(last_p, last)
        above, mass_above, equal, weight = _around(row, last_p, top, V, BLOCK)
        missing = goal - mass_above.to(tl.float64)
        share = tl.maximum(weight, 1).to(tl.float64)
        needed = tl.maximum(tl.ceil(missing / share), 1.0)
        room_p = tl.minimum(needed, 1.0 * V).to(tl.int64)
        if weight == 0:
            room_p = tl.full([], V, tl.int64)
        room = tl.where(last_p == last, tl.minimum(room, room_p), room_p)
        last = last_p
    seen = tl.zeros([], tl.int64)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        values = tl.load(row + columns, mask=inside, other=float("-inf"))
        keys = keys_of(values)
        ties = (inside & (keys == last)).to(tl.int64)
        place = seen + tl.cumsum(ties, 0)
        stays = (keys > last) | ((ties > 0) & (place <= room))
        tl.store(row + columns, float("-inf"), mask=inside & (stays == 0))
        seen += tl.sum(ties)


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    _keep_top[(num_rows,)](
        logits, top_k, top_p, logits.stride(0), V=vocab_size, BLOCK=_BLOCK, num_warps=16
    )
