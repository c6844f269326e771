"""Top-k first, by a program for each row that asks for it; then top-p among what is left, by
several programs a row.

Top-p's last token is looked for in an interval of values that becomes 16 times narrower with each
launch, in which masses at or above 15 values are summed up, in float32 and with a margin for its
rounding. The few tokens of the last interval are sorted, and which of them is the last follows from
masses in integers. Where there are many, since many are equal, the row's own program looks for it
by its bits. So no result depends on how a row is shared out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.keep_top.triton_order import (
    LOWEST,
    drop_behind,
    keys_of,
    last_rank,
    mass_of,
    ranked,
    values_of,
)

_BLOCK = 4096  # values that a row's program takes at a time
_PART, _FEW = 4096, 1024  # values of a part of a row; where nothing is in most parts
_ROOM = 1024
_STEPS = tl.constexpr(3)
# Of sums in float32: each part's, and over the parts.
_MARGIN = tl.constexpr(1e-5)


@triton.jit
def keep_k(logits, top_k, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Program: row."""
    row = logits + tl.program_id(0).to(tl.int64) * stride
    k = tl.maximum(tl.load(top_k + tl.program_id(0)), 1)
    if k >= V:
        return
    last = last_rank(row, k.to(tl.float64), 0.0, V, False, BLOCK)
    # Other threads may read what is dropped.
    tl.debug_barrier()
    for start in range(0, V, BLOCK):
        drop_behind(row, start + tl.arange(0, BLOCK), V, last)


@triton.jit
def part_maxima(
    logits, top_p, maxima, sums, totals, counts, stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """maxima: [rows, parts]. Zeroes all else. Program: (row, part)."""
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(top_p + row) >= 1:
        return
    columns = part * BLOCK + tl.arange(0, BLOCK)
    values = logits + row.to(tl.int64) * stride + columns
    values = tl.load(values, mask=columns < V, other=float("-inf"))
    tl.store(maxima + row * tl.num_programs(1) + part, tl.max(values))
    if part == 0:
        place = tl.arange(0, 16)
        for step in tl.static_range(_STEPS):
            tl.store(sums + (row * _STEPS + step) * 16 + place, tl.zeros([16], tl.float32))
        tl.store(totals + row * 2 + tl.arange(0, 2), tl.zeros([2], tl.int64))
        tl.store(counts + row, 0)


@triton.jit
def _top(maxima, num_parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    found = maxima + tl.program_id(0) * num_parts + part
    return tl.max(tl.load(found, mask=part < num_parts, other=float("-inf")))


@triton.jit
def _interval(sums, top, p, STEP: tl.constexpr):
    """(low, high) after so many steps: the last token that stays is at or above low, below high.

    What is subtracted is an integer times a power of two: all programs get the same numbers.
    """
    place = tl.arange(0, 16)
    high = top + 2.0
    low = high - 30.0  # where masses are 0
    goal = tl.full([], 0.0, tl.float32)
    for step in tl.static_range(STEP):
        width = 2.0 / 16**step
        found = tl.load(sums + (tl.program_id(0) * _STEPS + step) * 16 + place)
        if step == 0:
            goal = tl.maximum(p * tl.sum(tl.where(place == 14, found, 0.0)), 2.0**-40)
        misses = ((place < 15) & (found < goal * (1.0 + _MARGIN))).to(tl.int32)
        sure_misses = ((place < 15) & (found < goal * (1.0 - _MARGIN))).to(tl.int32)
        num_misses = tl.sum(misses)
        low = tl.where(num_misses < 15, high - (num_misses + 1).to(tl.float32) * width, low)
        high = high - tl.sum(sure_misses).to(tl.float32) * width
    return low, high


@triton.jit
def narrow(
    logits, top_p, maxima, sums, stride, num_parts, V: tl.constexpr, STEP: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sums: [rows, _STEPS, 16] float32: of STEP the masses at or above 15 values, of which the
    best one's is 1. Program: (row, part)."""
    row = tl.program_id(0)
    p = tl.load(top_p + row)
    if p >= 1:
        return
    top = _top(maxima, num_parts, PARTS)
    _, high = _interval(sums, top, p, STEP)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = logits + row.to(tl.int64) * stride + columns
    values = tl.load(values, mask=columns < V, other=float("-inf"))
    mass = tl.exp(values - top)
    width = 2.0 / 16**STEP
    place = tl.arange(0, 16)
    found = tl.zeros([16], tl.float32)
    for j in tl.static_range(15):
        one = tl.sum(tl.where(values >= high - (j + 1) * width, mass, 0.0))
        found = tl.where(place == j, one, found)
    tl.atomic_add(sums + (row * _STEPS + STEP) * 16 + place, found, mask=found > 0)


@triton.jit
def gather(
    logits, top_p, maxima, sums, totals, found, counts, stride, num_parts, V: tl.constexpr,
    PARTS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found: [rows, ROOM], what lies in the interval, as far as there is room; counts: how much
    does. totals: [rows, 2], the masses of all and of what is above. Program: (row, BLOCK values).
    """
    row = tl.program_id(0)
    p = tl.load(top_p + row)
    if p >= 1:
        return
    top = _top(maxima, num_parts, PARTS)
    low, high = _interval(sums, top, p, _STEPS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = logits + row.to(tl.int64) * stride + columns
    values = tl.load(values, mask=columns < V, other=float("-inf"))
    mass = tl.where(columns < V, mass_of(values, top), 0)
    tl.atomic_add(totals + row * 2, tl.sum(mass))
    above = tl.sum(tl.where(values >= high, mass, 0))
    if above > 0:
        tl.atomic_add(totals + row * 2 + 1, above)
    is_in = ((columns < V) & (values >= low) & (values < high)).to(tl.int32)
    count = tl.sum(is_in)
    if count > 0:
        place = tl.atomic_add(counts + row, count) + tl.cumsum(is_in, 0) - 1
        mask = (is_in > 0) & (place < ROOM)
        tl.store(found + row * ROOM + place, ranked(keys_of(values), columns), mask=mask)


@triton.jit
def find_last(
    logits, top_p, maxima, totals, found, counts, last, stride, num_parts, V: tl.constexpr,
    PARTS: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """last: [rows], the rank of the last token that stays. Program: row."""
    row = tl.program_id(0)
    p = tl.load(top_p + row)
    if p >= 1:
        return
    top = _top(maxima, num_parts, PARTS)
    # The best token stays even at top_p 0.
    goal = tl.maximum(tl.load(totals + row * 2).to(tl.float64) * p.to(tl.float64), 1.0)
    count = tl.load(counts + row)
    if count > ROOM:
        rank = last_rank(logits + row.to(tl.int64) * stride, goal, top, V, True, BLOCK)
    else:
        place = tl.arange(0, ROOM)
        ranks = tl.load(found + row * ROOM + place, mask=place < count, other=LOWEST)
        ranks = tl.sort(ranks, descending=True)
        mass = tl.where(place < count, mass_of(values_of(ranks), top), 0)
        reached = tl.load(totals + row * 2 + 1) + tl.cumsum(mass, 0)
        misses = tl.sum(((place < count) & (reached.to(tl.float64) < goal)).to(tl.int32))
        rank = tl.max(tl.where((place == misses) & (place < count), ranks, LOWEST))
    tl.store(last + row, rank)


@triton.jit
def drop(logits, top_p, last, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """Program: (row, part)."""
    row = tl.program_id(0)
    if tl.load(top_p + row) >= 1:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    drop_behind(logits + row.to(tl.int64) * stride, columns, V, tl.load(last + row))


def keep_top(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _PART)
    # Each memory of its own: kernels are compiled for how addresses are aligned.
    maxima = logits.new_empty((num_rows, num_parts))
    sums = logits.new_empty((num_rows, _STEPS.value, 16))
    totals = logits.new_empty((num_rows, 2), dtype=torch.int64)
    found = logits.new_empty((num_rows, _ROOM), dtype=torch.int64)
    counts = logits.new_empty(num_rows, dtype=torch.int32)
    last = logits.new_empty(num_rows, dtype=torch.int64)
    stride, parts = logits.stride(0), triton.next_power_of_2(num_parts)
    row, part = (num_rows,), (num_rows, num_parts)
    keep_k[row](logits, top_k, stride, V=vocab_size, BLOCK=_BLOCK, num_warps=16)
    part_maxima[part](
        logits, top_p, maxima, sums, totals, counts, stride, V=vocab_size, BLOCK=_PART
    )
    for step in range(_STEPS.value):
        narrow[part](
            logits, top_p, maxima, sums, stride, num_parts, V=vocab_size, STEP=step, PARTS=parts,
            BLOCK=_PART,
        )  # fmt: skip
    gather[(num_rows, triton.cdiv(vocab_size, _FEW))](
        logits, top_p, maxima, sums, totals, found, counts, stride, num_parts, V=vocab_size,
        PARTS=parts, ROOM=_ROOM, BLOCK=_FEW,
    )  # fmt: skip
    find_last[row](
        logits, top_p, maxima, totals, found, counts, last, stride, num_parts, V=vocab_size,
        PARTS=parts, ROOM=_ROOM, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    drop[part](logits, top_p, last, stride, V=vocab_size, BLOCK=_PART)
