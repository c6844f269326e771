"""What the Triton kernels of attention share. Only imported where a kernel is bound.

Scores live in base 2: a score s is kept as s * log2(e), so that exp2 serves. `top` is the largest
score so far, `total` the sum of exp2(score - top), `acc` the weighted sum of values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """With programmatic dependent launch a kernel starts while the one before it still runs: from
    here on everything that it wrote is there, and the next kernel may start in turn. What a step's
    inputs hold was there before, since kernels that are launched plainly come between."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def kv_rows(
    table_ptr,
    position,
    in_use,
    stride_block,
    stride_token,
    BLOCK_SIZE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Where the slots of one row's `position` [N] lie in the pool; where not in_use in block 0."""
    if IS_MASKED:
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=in_use, other=0)
    else:
        block = tl.load(table_ptr + position // BLOCK_SIZE)
    return block.to(tl.int64) * stride_block + (position % BLOCK_SIZE) * stride_token


@triton.jit
def load_heads(
    kv_ptr,
    scale_ptr,
    rows,
    at,
    scale_at,
    in_use,
    column,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_MASKED: tl.constexpr,
    HAS_CODES: tl.constexpr,
):
    """[N, D]: what lies at `at` in the slots at `rows` [N], 0 where not in_use. HAS_CODES: it is
    codes of a byte each, and their scale lies at scale_at in the slot, in units of two bytes."""
    place = kv_ptr + (rows + at)[:, None] + column[None, :]
    in_head = (column < HEAD_DIM)[None, :]
    if IS_MASKED:
        found = tl.load(place, mask=in_use[:, None] & in_head, other=0.0)
    elif column.shape[0] == HEAD_DIM:
        found = tl.load(place)
    else:
        found = tl.load(place, mask=in_head, other=0.0)
    if HAS_CODES:
        scale = tl.load(scale_ptr + rows // 2 + scale_at, mask=in_use, other=0.0).to(tl.float32)
        found = (found.to(tl.float32) * scale[:, None]).to(dtype)
    return found


@triton.jit
def load_tile(
    kv_ptr, scale_ptr, row_table, start, end, kv_head, column,
    stride_block, stride_token, stride_kv, stride_head, dtype: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr, HAS_CODES: tl.constexpr,
):  # fmt: skip
    """Keys and values [BLOCK_N, D] of one row's positions from `start` on; IS_MASKED: those from
    `end` on are 0."""
    position = start + tl.arange(0, BLOCK_N)
    in_use = position < end
    rows = kv_rows(row_table, position, in_use, stride_block, stride_token, BLOCK_SIZE, IS_MASKED)
    at, scale_at = kv_head * stride_head, NUM_KV_HEADS * HEAD_DIM + kv_head
    keys = load_heads(
        kv_ptr, scale_ptr, rows, at, scale_at, in_use, column, dtype, HEAD_DIM, IS_MASKED, HAS_CODES
    )
    at += stride_kv
    scale_at += NUM_KV_HEADS
    values = load_heads(
        kv_ptr, scale_ptr, rows, at, scale_at, in_use, column, dtype, HEAD_DIM, IS_MASKED, HAS_CODES
    )
    return keys, values


@triton.jit
def capped(products, scale, SOFTCAP: tl.constexpr):
    """(scores, factor) of query-key products: scores * factor are the scores in base 2. The factor
    is positive, so that the largest score can be found before it is multiplied."""
    if SOFTCAP > 0.0:
        # tanh x = 1 - 2 / (exp 2x + 1)
        wide = tl.exp2(products * (scale * 2.8853900817779268 / SOFTCAP))
        return 1.0 - 2.0 / (wide + 1.0), SOFTCAP * 1.4426950408889634
    else:
        return products, scale * 1.4426950408889634


@triton.jit
def online_softmax(scores, factor, values, top, total, acc, PRECISION: tl.constexpr):
    """Takes the next keys in: scores [M, N], -inf where a key is not seen; values [N, D]."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    # A token that has seen nothing yet keeps -inf; subtracting it from itself would be NaN.
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - safe_top[:, None])
    rescale = tl.exp2(top - safe_top)
    total = tl.fma(total, rescale, tl.sum(weights, 1))
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def merge(top, total, acc, other_top, other_total, other_acc):
    """Partial results over other keys; of one row [D], or of rows [M] and [M, D]. Merging with
    what has seen nothing changes no bit: exp2(0) = 1 scales, and 0 is added."""
    new_top = tl.maximum(top, other_top)
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    mine, theirs = tl.exp2(top - safe_top), tl.exp2(other_top - safe_top)
    total = tl.fma(total, mine, other_total * theirs)
    acc = tl.fma(acc, mine[:, None], other_acc * theirs[:, None])
    return new_top, total, acc


@triton.jit
def with_sink(top, total, acc, sinks_ptr, head, HAS_SINKS: tl.constexpr):
    """A sink joins the denominator and has no value. head: [M], the query head of each row."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        rescale = tl.exp2(top - new_top)
        total = tl.fma(total, rescale, tl.exp2(sink - new_top))
        acc = acc * rescale[:, None]
        top = new_top
    return top, total, acc


@triton.jit
def rotated(
    base,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    column,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Heads at `base` [H, 1], normed and rotated, float32 [H, D]; column: [D], those beyond
    HEAD_DIM give 0. A column and its partner half a rotation away are both loaded."""
    half: tl.constexpr = ROTARY_DIM // 2
    is_first, turns = column < half, column < ROTARY_DIM
    partner = tl.where(is_first, column + half, tl.where(turns, column - half, column))
    in_head = column < HEAD_DIM
    x = tl.load(base + column[None, :], mask=in_head[None, :], other=0.0).to(tl.float32)
    y = tl.load(base + partner[None, :], mask=in_head[None, :], other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * rstd * tl.load(norm_ptr + column, mask=in_head, other=0.0).to(tl.float32)[None, :]
        y = y * rstd * tl.load(norm_ptr + partner, mask=in_head, other=0.0).to(tl.float32)[None, :]
    cos = tl.load(cos_ptr + column, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + column % half, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(is_first, -sin, sin)
    return x * cos[None, :] + y * sin[None, :]
