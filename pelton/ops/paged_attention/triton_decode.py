"""Rows with few query tokens: one program for each row, key head and split of the row's keys.

All query heads of the key head and all query tokens of the row are one tile, token by token: tile
row i is token i // group, head i % group. The number of splits is a launch bound; how long a split
is follows from the row's length on the device, so one launch serves every length. Programs of
splits that a short row does not need end at once. The last program of a row and head to arrive
merges the splits in their order: which one that is changes no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.ops.paged_attention.triton_parts import (
    capped,
    load_tile,
    merge,
    online_softmax,
    rotated,
    wait_for_inputs,
    with_sink,
)


@triton.jit
def _attend_tile(
    query, keys, values, start, end, last_key, scale, top, total, acc,
    SEES_ALL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    position = start + tl.arange(0, BLOCK_N)
    products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
    scores, factor = capped(products, scale, SOFTCAP)
    is_seen = (position < end)[None, :]
    if not SEES_ALL:
        is_seen &= position[None, :] <= last_key[:, None]
        if WINDOW:
            is_seen &= position[None, :] > last_key[:, None] - WINDOW
    scores = tl.where(is_seen, scores, float("-inf"))
    return online_softmax(scores, factor, values, top, total, acc, PRECISION)


@triton.jit
def _store_rows(
    out_ptr,
    lse_ptr,
    result,
    top,
    total,
    token,
    head,
    is_live,
    column,
    stride_out,
    HEAD_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    at = token.to(tl.int64) * stride_out + head * HEAD_DIM
    mask = is_live[:, None] & (column < HEAD_DIM)[None, :]
    result = (result / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + column[None, :], result, mask=mask)
    if HAS_LSE:
        lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + token.to(tl.int64) * NUM_HEADS + head, lse, mask=is_live)


@triton.jit(do_not_specialize=["min_split", "stride_table"])
def decode(
    query_ptr,  # [T, Hq, D] in a wider row; IS_FUSED: the qkv product [T, (Hq + 2 Hk) D]
    kv_ptr,
    scale_ptr,  # the pool in units of two bytes, HAS_CODES
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] float32, HAS_LSE
    query_start_ptr,  # [B + 1]
    seq_lens_ptr,  # [B]
    table_ptr,  # [B, W]
    sinks_ptr,  # [Hq], HAS_SINKS
    partial_ptr,  # float32 [B * Hk, S, ROWS, D + 2], where S > 1
    arrived_ptr,  # int32 [B * Hk], zero between launches
    kv_slots_ptr,  # [T], IS_FUSED as all that follows
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scale,
    eps,
    min_split,
    stride_query,
    stride_out,
    stride_table,
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
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_CODES: tl.constexpr,  # not with IS_FUSED
    HAS_NORM: tl.constexpr,
    IS_FUSED: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # there may be more than one split
    IS_FIXED: tl.constexpr,  # splits are min_split keys each, merged one by one
    MAX_QUERY: tl.constexpr,  # rows with more query tokens are another kernel's
    ROWS: tl.constexpr,  # power of two >= MAX_QUERY * group
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,  # splits that are merged at once
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row_head = tl.program_id(0)
    split, max_splits = tl.program_id(1), tl.num_programs(1)
    row, kv_head = row_head // NUM_KV_HEADS, row_head % NUM_KV_HEADS
    seq_len = tl.load(seq_lens_ptr + row)
    if IS_FUSED:
        first_token, query_len = row, 1
    else:
        # Before any program ends: the next kernel takes the end of all of them for the end of
        # what came before.
        wait_for_inputs(PDL)
        first_token = tl.load(query_start_ptr + row)
        query_len = tl.load(query_start_ptr + row + 1) - first_token
    tile_row = tl.arange(0, BLOCK_M)
    head = kv_head * group + tile_row % group
    token = first_token + tile_row // group
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    if IS_FUSED:
        is_live = tile_row < group
        if seq_len == 0:
            # A row of padding, and token `row` is its token.
            wait_for_inputs(PDL)
            if split == 0:
                at = token.to(tl.int64) * stride_out + head * HEAD_DIM
                zeros = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
                mask = is_live[:, None] & in_head[None, :]
                tl.store(out_ptr + at[:, None] + column[None, :], zeros, mask=mask)
            return
        # The row's newest key is this program's to store, and is not read from the pool.
        num_keys = seq_len - 1
        last_key = tl.full([BLOCK_M], 0, tl.int32) + num_keys
    else:
        if (query_len == 0) | (query_len > MAX_QUERY):
            return
        is_live = tile_row < query_len * group
        num_keys = seq_len
        last_key = seq_len - query_len + tl.minimum(tile_row // group, query_len - 1)
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - query_len + 1 - WINDOW, 0)
    if IS_FIXED:
        split_len = min_split
        first_split = begin // split_len
        begin = first_split * split_len
    else:
        split_len = tl.cdiv(tl.cdiv(num_keys - begin, max_splits), BLOCK_N) * BLOCK_N
        split_len = tl.maximum(split_len, min_split)
    end = num_keys
    num_splits = 1
    if IS_SPLIT:
        num_splits = tl.maximum(tl.cdiv(num_keys - begin, split_len), 1)
        if split >= num_splits:
            return
        begin += split * split_len
        end = tl.minimum(begin + split_len, num_keys)
    row_table = table_ptr + row.to(tl.int64) * stride_table
    if IS_EARLY:
        # The first tile is on its way while the query is waited for, normed and rotated.
        early_keys, early_values = load_tile(
            kv_ptr, scale_ptr, row_table, begin, end, kv_head, column,
            stride_block, stride_token, stride_kv, stride_head, query_ptr.dtype.element_ty,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, HAS_CODES,
        )  # fmt: skip

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if IS_FUSED:
        wait_for_inputs(PDL)
        query_row = query_ptr + row.to(tl.int64) * stride_query
        cos_row, sin_row = (
            cos_ptr + row.to(tl.int64) * stride_cos,
            sin_ptr + row.to(tl.int64) * stride_sin,
        )
        safe_head = tl.where(is_live, head, kv_head * group)
        query = rotated(
            query_row + safe_head[:, None] * HEAD_DIM,
            q_norm_ptr, cos_row, sin_row, column, eps, HEAD_DIM, ROTARY_DIM, HAS_NORM,
        ).to(query_ptr.dtype.element_ty)  # fmt: skip
        if split == 0:
            one = tl.arange(0, 1)
            key_row = query_row + (NUM_HEADS + kv_head) * HEAD_DIM
            key = rotated(
                key_row + one[:, None],
                k_norm_ptr, cos_row, sin_row, column, eps, HEAD_DIM, ROTARY_DIM, HAS_NORM,
            ).to(kv_ptr.dtype.element_ty)  # fmt: skip
            value_row = key_row + NUM_KV_HEADS * HEAD_DIM
            value = tl.load(
                value_row + one[:, None] + column[None, :], mask=in_head[None, :], other=0.0
            )
            slot = tl.load(kv_slots_ptr + row)
            if slot >= 0:
                block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
                at = kv_ptr + block * stride_block + place * stride_token + kv_head * stride_head
                tl.store(at + one[:, None] + column[None, :], key, mask=in_head[None, :])
                tl.store(
                    at + stride_kv + one[:, None] + column[None, :], value, mask=in_head[None, :]
                )
            products = tl.sum(query.to(tl.float32) * key.to(tl.float32), 1)
            scores, factor = capped(products, scale, SOFTCAP)
            top = scores * factor
            total += 1.0
            acc += value.to(tl.float32)
    else:
        at = token.to(tl.int64) * stride_query + head * HEAD_DIM
        mask = is_live[:, None] & in_head[None, :]
        query = tl.load(query_ptr + at[:, None] + column[None, :], mask=mask, other=0.0)

    if IS_EARLY:
        top, total, acc = _attend_tile(
            query, early_keys, early_values, begin, end, last_key, scale, top, total, acc,
            IS_FUSED, WINDOW, SOFTCAP, BLOCK_N, PRECISION,
        )  # fmt: skip
        begin += BLOCK_N
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        keys, values = load_tile(
            kv_ptr, scale_ptr, row_table, start, end, kv_head, column,
            stride_block, stride_token, stride_kv, stride_head, query_ptr.dtype.element_ty,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, HAS_CODES,
        )  # fmt: skip
        top, total, acc = _attend_tile(
            query, keys, values, start, end, last_key, scale, top, total, acc,
            IS_FUSED, WINDOW, SOFTCAP, BLOCK_N, PRECISION,
        )  # fmt: skip

    if not IS_SPLIT or num_splits == 1:
        top, total, acc = with_sink(top, total, acc, sinks_ptr, head, HAS_SINKS)
        _store_rows(
            out_ptr, lse_ptr, acc, top, total, token, head, is_live, column, stride_out,
            HEAD_DIM, NUM_HEADS, HAS_LSE,
        )  # fmt: skip
        return

    # Partial results: [split, ROWS, D] of this row and head, and behind all of them top and total.
    mine = partial_ptr + row_head.to(tl.int64) * max_splits * ROWS * (BLOCK_D + 2)
    facts = mine + max_splits * ROWS * BLOCK_D
    part = split * ROWS + tile_row
    tl.store(mine + part[:, None] * BLOCK_D + column[None, :], acc, mask=is_live[:, None])
    tl.store(facts + part, top, mask=is_live)
    tl.store(facts + max_splits * ROWS + part, total, mask=is_live)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row_head, 1, sem="acq_rel") != num_splits - 1:
        return
    tl.store(arrived_ptr + row_head, 0)
    small_row = tl.arange(0, ROWS)
    is_live = small_row < query_len * group
    head, token = kv_head * group + small_row % group, first_token + small_row // group
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    if IS_FIXED:
        for s in range(num_splits):
            place = s * ROWS + small_row
            other_top = tl.load(facts + place, mask=is_live, other=float("-inf"))
            other_total = tl.load(facts + max_splits * ROWS + place, mask=is_live, other=0.0)
            other = tl.load(
                mine + place[:, None] * BLOCK_D + column[None, :], mask=is_live[:, None], other=0.0
            )
            top, total, acc = merge(top, total, acc, other_top, other_total, other)
    else:
        for first in range(0, num_splits, CHUNK):
            s = first + tl.arange(0, CHUNK)
            spot = s[:, None] * ROWS + small_row[None, :]
            is_there = (s < num_splits)[:, None] & is_live[None, :]
            tops = tl.load(facts + spot, mask=is_there, other=float("-inf"))
            totals = tl.load(facts + max_splits * ROWS + spot, mask=is_there, other=0.0)
            others = tl.load(
                mine + spot[:, :, None] * BLOCK_D + column[None, None, :],
                mask=is_there[:, :, None],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(tops, 0))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(tops - safe_top[None, :])
            rescale = tl.exp2(top - safe_top)
            total = total * rescale + tl.sum(totals * weights, 0)
            acc = acc * rescale[:, None] + tl.sum(others * weights[:, :, None], 0)
            top = new_top
    top, total, acc = with_sink(
        top, total, acc, sinks_ptr, tl.where(is_live, head, kv_head * group), HAS_SINKS
    )
    _store_rows(
        out_ptr, lse_ptr, acc, top, total, token, head, is_live, column, stride_out,
        HEAD_DIM, NUM_HEADS, HAS_LSE,
    )  # fmt: skip
