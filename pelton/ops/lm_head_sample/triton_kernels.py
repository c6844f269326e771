"""From hidden states, or from logits, to each tile's best token; and from these to a token.

A score is a logit, rounded to the head's type, of a greedy row; of another one the logit divided by
the temperature, and noise. NaN counts as +inf: both make the row unsound.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.core import plan
from pelton.ops.gumbel_argmax.triton_noise import gumbel_noise, row_keys

OK = tl.constexpr(plan.OK)
NAN_LOGITS = tl.constexpr(plan.NAN_LOGITS)
ALL_MASKED = tl.constexpr(plan.ALL_MASKED)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _scores(logits, ids, is_id, is_noisy, heat, key0, key1, DIVIDES: tl.constexpr):
    """logits float32, all else broadcasting with it. is_noisy: whether any row is."""
    scores = logits
    if is_noisy:
        noisy = logits
        if DIVIDES:
            noisy = tl.div_rn(logits, tl.where(heat > 0, heat, 1.0))
        noisy += gumbel_noise(ids, key0, key1)
        scores = tl.where(heat > 0, noisy, logits)
    scores = tl.where(scores != scores, float("inf"), scores)
    return tl.where(is_id, scores, float("-inf"))


@triton.jit
def _row_state(rows, exists, slots, positions, temperature, seeds):
    slot = tl.load(slots + rows, mask=exists, other=0)
    heat = tl.load(temperature + slot, mask=exists, other=0.0)
    position = tl.load(positions + rows, mask=exists, other=0)
    key0, key1 = row_keys(tl.load(seeds + slot, mask=exists, other=0), position + 1)
    return heat, key0, key1


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def head_tiles(
    hidden,
    indices,
    weight,
    norm_weight,
    slots,
    positions,
    temperature,
    seeds,
    best_scores,
    best_ids,
    hidden_stride,
    num_rows,
    num_parts,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """hidden [T, H], weight [V, H] -> the best of BLOCK_N tokens for each of up to BLOCK_T rows:
    best_scores float32 and best_ids int32, [rows, num_parts].

    The norm's scale is the same for all products of a row, so it comes at the end.
    """
    tile = tl.program_id(0)
    ids = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, BLOCK_T)
    exists = rows < num_rows
    index = tl.load(indices + rows, mask=exists, other=0)
    # Rows past the vocabulary's end repeat the last one, and do not count.
    w_rows = weight + tl.minimum(ids, V - 1).to(tl.int64)[:, None] * H
    x_rows = hidden + index[:, None] * hidden_stride
    logits = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for k in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        if H % BLOCK_K == 0:
            w = tl.load(w_rows + columns[None, :], eviction_policy="evict_first")
            g = tl.load(norm_weight + columns)
            x = tl.load(x_rows + columns[None, :])
        else:
            inside = columns < H
            w = tl.load(w_rows + columns[None, :], mask=inside[None, :], other=0.0)
            g = tl.load(norm_weight + columns, mask=inside, other=0.0)
            x = tl.load(x_rows + columns[None, :], mask=inside[None, :], other=0.0)
        x32 = x.to(tl.float32)
        squares += x32 * x32
        x = (x32 * g.to(tl.float32)[None, :]).to(w.dtype)
        logits = tl.dot(w, tl.trans(x), logits, input_precision="ieee")
    scale = tl.rsqrt(tl.sum(squares, 1) / H + eps)
    logits = (logits * scale[None, :]).to(weight.dtype.element_ty).to(tl.float32)
    heat, key0, key1 = _row_state(rows, exists, slots, positions, temperature, seeds)
    ids = ids[:, None]
    is_id = ids < V
    scores = _scores(
        logits, ids, is_id, tl.max(heat) > 0, heat[None, :], key0[None, :], key1[None, :], True
    )
    best = tl.max(scores, 0)
    best_id = tl.min(tl.where((scores == best[None, :]) & is_id, ids, NO_ID), 0)
    place = rows * num_parts + tile
    tl.store(best_scores + place, best, mask=exists)
    tl.store(best_ids + place, best_id, mask=exists)


@triton.jit(do_not_specialize=["num_parts"])
def logit_tiles(
    logits,
    slots,
    positions,
    temperature,
    seeds,
    best_scores,
    best_ids,
    logits_stride,
    num_parts,
    V: tl.constexpr,
    DIVIDES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """logits [N, V] -> the best of WIDTH tokens: as `head_tiles`. Program: (row, part).

    DIVIDES: whether the temperature is still to be divided by.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    heat, key0, key1 = _row_state(row, True, slots, positions, temperature, seeds)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK_V], NO_ID, tl.int32)
    for start in range(0, WIDTH, BLOCK_V):
        ids = part * WIDTH + start + tl.arange(0, BLOCK_V)
        is_id = ids < V
        place = logits + row.to(tl.int64) * logits_stride + ids
        values = tl.load(place, mask=is_id, other=0.0).to(tl.float32)
        scores = _scores(values, ids, is_id, heat > 0, heat, key0, key1, DIVIDES)
        # Ids ascend, so an equal one that comes later does not win; but the first always does.
        wins = (scores > best) | (best_id == NO_ID)
        best_id = tl.where(wins & is_id, ids, best_id)
        best = tl.where(wins, scores, best)
    top = tl.max(best)
    place = row * num_parts + part
    tl.store(best_scores + place, top)
    tl.store(best_ids + place, tl.min(tl.where(best == top, best_id, NO_ID)))


@triton.jit(do_not_specialize=["num_parts"])
def pick(
    best_scores,
    best_ids,
    out_ids,
    out_status,
    out_max,
    num_parts,
    TELLS_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of a row's parts; and its status or, with TELLS_MAX, its score."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    exists = part < num_parts
    scores = tl.load(best_scores + row * num_parts + part, mask=exists, other=float("-inf"))
    ids = tl.load(best_ids + row * num_parts + part, mask=exists, other=NO_ID)
    top = tl.max(scores)
    best_id = tl.min(tl.where(scores == top, ids, NO_ID))
    status = tl.where(top == float("inf"), NAN_LOGITS, OK)
    status = tl.where(top == float("-inf"), ALL_MASKED, status)
    if TELLS_MAX:
        # All of them -inf: any id; NaN among them: another may win.
        tl.store(out_ids + row, best_id)
        tl.store(out_max + row, top)
    else:
        tl.store(out_ids + row, tl.where(status == OK, best_id, 0))
        tl.store(out_status + row, status)
