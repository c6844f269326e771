"""Norms, rotation and KV store in one kernel: a program for each token and some of its heads.

Query heads go back to where they lay, key heads too (a chunk reads its own from there) and into
their slot, value heads into the slot alone. A token of padding (slot -1) gets zeros as output and
stores nothing. Where keys and values are quantised, a kernel of its own does that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.ops.paged_attention.triton_parts import wait_for_inputs


@triton.jit
def _half(base, column, in_use):
    return tl.load(base + column[None, :], mask=in_use, other=0.0).to(tl.float32)


@triton.jit
def rotate_and_store(
    qkv_ptr,  # [T, (Hq + 2 Hk) D]
    kv_ptr,
    out_ptr,  # [T, Hq D]
    kv_slots_ptr,  # [T]
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    stride_qkv,
    stride_out,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    stride_cos,
    stride_sin,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CODES: tl.constexpr,  # nothing is stored here
    HEADS: tl.constexpr,  # heads of a program
    BLOCK_HALF: tl.constexpr,  # power of two >= ROTARY_DIM / 2
    BLOCK_REST: tl.constexpr,  # power of two >= HEAD_DIM - ROTARY_DIM, or 0
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    half: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    wait_for_inputs(PDL)
    slot = tl.load(kv_slots_ptr + token)
    qkv_row = qkv_ptr + token * stride_qkv
    head = first_head + tl.arange(0, HEADS)
    if slot < 0:
        column = tl.arange(0, BLOCK_D)
        mask = (head < NUM_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
        at = out_ptr + token * stride_out + head[:, None] * HEAD_DIM + column[None, :]
        tl.store(at, tl.zeros([HEADS, BLOCK_D], out_ptr.dtype.element_ty), mask=mask)
        return
    slot_row = kv_ptr + (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
    if first_head < NUM_HEADS + NUM_KV_HEADS:
        is_live = head < NUM_HEADS + NUM_KV_HEADS
        is_key = is_live & (head >= NUM_HEADS)
        heads = qkv_row + head[:, None] * HEAD_DIM
        slots = slot_row + (head[:, None] - NUM_HEADS) * stride_head
        column = tl.arange(0, BLOCK_HALF)
        in_half = column < half
        mask = is_live[:, None] & in_half[None, :]
        x = _half(heads, column, mask)
        y = _half(heads + half, column, mask)
        if HAS_NORM:
            squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if BLOCK_REST:
            rest_column = ROTARY_DIM + tl.arange(0, BLOCK_REST)
            in_rest = rest_column < HEAD_DIM
            rest_mask = is_live[:, None] & in_rest[None, :]
            z = _half(heads, rest_column, rest_mask)
            if HAS_NORM:
                squares += tl.sum(z * z, 1)
        if HAS_NORM:
            rstd = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            is_query = (head < NUM_HEADS)[:, None]
            x *= rstd * tl.where(
                is_query, _half(q_norm_ptr, column, in_half[None, :]),
                _half(k_norm_ptr, column, in_half[None, :]),
            )  # fmt: skip
            y *= rstd * tl.where(
                is_query, _half(q_norm_ptr + half, column, in_half[None, :]),
                _half(k_norm_ptr + half, column, in_half[None, :]),
            )  # fmt: skip
            if BLOCK_REST:
                z *= rstd * tl.where(
                    is_query, _half(q_norm_ptr, rest_column, in_rest[None, :]),
                    _half(k_norm_ptr, rest_column, in_rest[None, :]),
                )  # fmt: skip
        cos = _half(cos_ptr + token * stride_cos, column, in_half[None, :])
        sin = _half(sin_ptr + token * stride_sin, column, in_half[None, :])
        first = (x * cos - y * sin).to(qkv_ptr.dtype.element_ty)
        second = (y * cos + x * sin).to(qkv_ptr.dtype.element_ty)
        tl.store(heads + column[None, :], first, mask=mask)
        tl.store(heads + half + column[None, :], second, mask=mask)
        if not HAS_CODES:
            mask = is_key[:, None] & in_half[None, :]
            tl.store(slots + column[None, :], first, mask=mask)
            tl.store(slots + half + column[None, :], second, mask=mask)
        if BLOCK_REST:
            rest = z.to(qkv_ptr.dtype.element_ty)
            tl.store(heads + rest_column[None, :], rest, mask=rest_mask)
            if not HAS_CODES:
                mask = is_key[:, None] & in_rest[None, :]
                tl.store(slots + rest_column[None, :], rest, mask=mask)
    if not HAS_CODES and first_head + HEADS > NUM_HEADS + NUM_KV_HEADS:
        kv_head = head - NUM_HEADS - NUM_KV_HEADS
        column = tl.arange(0, BLOCK_D)
        mask = ((kv_head >= 0) & (kv_head < NUM_KV_HEADS))[:, None] & (column < HEAD_DIM)[None, :]
        value = tl.load(qkv_row + head[:, None] * HEAD_DIM + column[None, :], mask=mask)
        at = slot_row + kv_head[:, None] * stride_head + stride_kv + column[None, :]
        tl.store(at, value, mask=mask)


@triton.jit
def quantise_and_store(
    qkv_ptr,  # [T, (Hq + 2 Hk) D]; keys rotated
    kv_ptr,  # the pool as codes
    scale_ptr,  # the pool in units of two bytes
    kv_slots_ptr,  # [T]
    stride_qkv,
    stride_block,
    stride_token,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,  # code
    SMALLEST_SCALE: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """As ops/quantise_kv: keys and values are 2 Hk heads, one behind the other on both sides."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK_D)
    is_live = head < 2 * NUM_KV_HEADS
    mask = is_live[:, None] & (column < HEAD_DIM)[None, :]
    wait_for_inputs(PDL)
    slot = tl.load(kv_slots_ptr + token)
    if slot < 0:
        return
    heads = qkv_ptr + token * stride_qkv + (NUM_HEADS + head[:, None]) * HEAD_DIM
    x = tl.load(heads + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([HEADS], LARGEST, tl.float32))
    # A NaN or an infinity makes NaN of all.
    scale = tl.maximum(scale, SMALLEST_SCALE) + tl.sum(x * 0.0, 1)
    scale = scale.to(scale_ptr.dtype.element_ty)
    wide = tl.broadcast_to(scale.to(tl.float32)[:, None], [HEADS, BLOCK_D])
    codes = tl.div_rn(x, wide)
    if IS_INTEGER:
        # To the nearest, ties to even: a float32 of this size has no places behind the point.
        codes = (codes + 12582912.0) - 12582912.0
    row = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token
    at = kv_ptr + row + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(at, codes.to(kv_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row // 2 + NUM_KV_HEADS * HEAD_DIM + head, scale, mask=is_live)
