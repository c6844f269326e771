"""A draw among few candidates: a program has a row."""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.ops.gumbel_argmax.triton_noise import gumbel_noise, row_keys

NO_ID = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["C", "stride", "ids_stride"])
def draw_candidate(
    values,
    token_ids,
    temperature,
    seeds,
    positions,
    out_ids,
    out_max,
    stride,
    ids_stride,
    C,
    BLOCK: tl.constexpr,
):
    """values: [N, C] float32; all else as in the contract."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < C
    scores = tl.load(values + row * stride + column, mask=inside, other=float("-inf"))
    ids = tl.load(token_ids + row * ids_stride + column, mask=inside, other=NO_ID)
    if tl.load(temperature + row) > 0:
        key0, key1 = row_keys(tl.load(seeds + row), tl.load(positions + row))
        scores += gumbel_noise(ids, key0, key1)
    # Beside a NaN, which counts as +inf, another one may win; both make the row unsound.
    scores = tl.where(scores != scores, float("inf"), scores)
    best = tl.max(scores, 0)
    tl.store(out_max + row, best)
    tl.store(out_ids + row, tl.min(tl.where((scores == best) & inside, ids, NO_ID), 0))
