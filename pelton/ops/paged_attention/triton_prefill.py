"""Rows with many query tokens: one program for each key head and tile of query tokens.

The query heads of a key head share its tile: tile row i is token i // group, head i % group. Rows
of a batch lie one behind the other; how many tiles there can be follows from the numbers of tokens
and rows, and a program finds its row by their cumulative lengths on the device. Programs beyond the
last tile, and those of rows with few query tokens, end at once.

Keys and values are read from pages; with HAS_FRESH those of the step itself from the qkv product,
where they lie in a row and the copy engine fetches whole tiles of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton.ops.paged_attention.triton_parts import (
    capped,
    load_tile,
    merge,
    online_softmax,
    wait_for_inputs,
    with_sink,
)


@triton.jit
def _visible(position, last_key, end, WINDOW: tl.constexpr):
    """[M, N]: which keys at `position` [N] the tokens whose last key is last_key [M] see."""
    is_seen = (position[None, :] <= last_key[:, None]) & (position < end)[None, :]
    if WINDOW:
        is_seen &= position[None, :] > last_key[:, None] - WINDOW
    return is_seen


@triton.jit
def _over_pages(
    query, kv_ptr, scale_ptr, row_table, begin, end, last_key, column, top, total, acc,
    kv_head, scale, stride_block, stride_token, stride_kv, stride_head,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HAS_CODES: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        keys, values = load_tile(
            kv_ptr, scale_ptr, row_table, start, end, kv_head, column,
            stride_block, stride_token, stride_kv, stride_head, query.dtype,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, IS_MASKED, HAS_CODES,
        )  # fmt: skip
        products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores, factor = capped(products, scale, SOFTCAP)
        if IS_MASKED:
            is_seen = _visible(start + tl.arange(0, BLOCK_N), last_key, end, WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        top, total, acc = online_softmax(scores, factor, values, top, total, acc, PRECISION)
    return top, total, acc


@triton.jit
def _over_fresh(
    query, fresh, first_token, begin, end, last_key, computed, top, total, acc, kv_head, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """begin, end: tokens of the row's chunk."""
    key_column = (NUM_HEADS + kv_head) * HEAD_DIM
    value_column = key_column + NUM_KV_HEADS * HEAD_DIM
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        place = start + tl.arange(0, BLOCK_N)
        keys = fresh.load([first_token + start, key_column])
        values = fresh.load([first_token + start, value_column])
        if IS_MASKED:
            # What lies behind the row may be anything, and 0 * NaN is not 0.
            values = tl.where((place < end)[:, None], values, 0.0)
        products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        scores, factor = capped(products, scale, SOFTCAP)
        if IS_MASKED:
            is_seen = _visible(computed + place, last_key, computed + end, 0)
            scores = tl.where(is_seen, scores, float("-inf"))
        top, total, acc = online_softmax(scores, factor, values, top, total, acc, PRECISION)
    return top, total, acc


@triton.jit(do_not_specialize=["num_rows", "split_len", "stride_table"])
def prefill(
    query_ptr,  # [T, Hq, D] in a wider row
    fresh,  # HAS_FRESH: a descriptor of the qkv product, [T, (Hq + 2 Hk) D], in [BLOCK_N, D]
    kv_ptr,
    scale_ptr,  # the pool in units of two bytes, HAS_CODES
    out_ptr,  # [T, Hq, D]
    lse_ptr,  # [T, Hq] float32, HAS_LSE
    query_start_ptr,  # [B + 1]
    seq_lens_ptr,  # [B]
    table_ptr,  # [B, W]
    sinks_ptr,  # [Hq], HAS_SINKS
    num_rows,
    split_len,  # IS_FIXED: keys of a split, merged one by one as triton_decode does
    scale,
    stride_query,
    stride_out,
    stride_table,
    stride_block,
    stride_token,
    stride_kv,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_FRESH: tl.constexpr,  # not with HAS_CODES
    IS_FIXED: tl.constexpr,
    MIN_QUERY: tl.constexpr,  # rows with fewer query tokens are another kernel's
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile_tokens: tl.constexpr = BLOCK_M // group
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    # Later tiles see more keys: they go first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Row r's tiles start at query_start[r] // tile_tokens + r, which leaves room for its last one.
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // tile_tokens + middle <= tile:
            low = middle
        else:
            high = middle
    row = low
    first_token = tl.load(query_start_ptr + row)
    query_len = tl.load(query_start_ptr + row + 1) - first_token
    tile_start = (tile - first_token // tile_tokens - row) * tile_tokens
    if (tile_start >= query_len) | (query_len < MIN_QUERY):
        return
    seq_len = tl.load(seq_lens_ptr + row)
    computed = seq_len - query_len
    tile_end = tl.minimum(tile_start + tile_tokens, query_len)

    tile_row = tl.arange(0, BLOCK_M)
    head = kv_head * group + tile_row % group
    place = tile_start + tile_row // group
    is_live = (place < query_len) & (tile_row < tile_tokens * group)
    last_key = computed + tl.minimum(place, tile_end - 1)
    token = (first_token + place).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    mask = is_live[:, None] & in_head[None, :]
    at = token * stride_query + head * HEAD_DIM
    query = tl.load(query_ptr + at[:, None] + column[None, :], mask=mask, other=0.0)
    row_table = table_ptr + row.to(tl.int64) * stride_table
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    end = computed + tile_end  # keys that the tile's last token sees
    if IS_FIXED:
        begin = 0
        if WINDOW:
            begin = tl.maximum(computed + tile_start + 1 - WINDOW, 0) // split_len * split_len
        for split in range(begin, end, split_len):
            new_top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            new_total = tl.zeros([BLOCK_M], tl.float32)
            new_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            new_top, new_total, new_acc = _over_pages(
                query, kv_ptr, scale_ptr, row_table, split, tl.minimum(split + split_len, end),
                last_key, column, new_top, new_total, new_acc, kv_head, scale,
                stride_block, stride_token, stride_kv, stride_head,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, HAS_CODES, BLOCK_N, True,
                PRECISION, NUM_STAGES,
            )  # fmt: skip
            top, total, acc = merge(top, total, acc, new_top, new_total, new_acc)
    elif WINDOW:
        begin = tl.maximum(computed + tile_start + 1 - WINDOW, 0)
        top, total, acc = _over_pages(
            query, kv_ptr, scale_ptr, row_table, begin, end, last_key,
            column, top, total, acc, kv_head, scale,
            stride_block, stride_token, stride_kv, stride_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            WINDOW, SOFTCAP, HAS_CODES, BLOCK_N, True, PRECISION, NUM_STAGES,
        )  # fmt: skip
    else:
        # Whole tiles of keys that all tokens see need no mask.
        from_pages = end if not HAS_FRESH else computed
        whole = (computed + tile_start + 1) if not HAS_FRESH else computed
        whole = whole // BLOCK_N * BLOCK_N
        top, total, acc = _over_pages(
            query, kv_ptr, scale_ptr, row_table, 0, whole, last_key,
            column, top, total, acc, kv_head, scale,
            stride_block, stride_token, stride_kv, stride_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            0, SOFTCAP, HAS_CODES, BLOCK_N, False, PRECISION, NUM_STAGES,
        )  # fmt: skip
        top, total, acc = _over_pages(
            query, kv_ptr, scale_ptr, row_table, whole, from_pages, last_key,
            column, top, total, acc, kv_head, scale,
            stride_block, stride_token, stride_kv, stride_head, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            0, SOFTCAP, HAS_CODES, BLOCK_N, True, PRECISION, NUM_STAGES,
        )  # fmt: skip
        if HAS_FRESH:
            whole = (tile_start + 1) // BLOCK_N * BLOCK_N
            top, total, acc = _over_fresh(
                query, fresh, first_token, 0, whole, last_key, computed, top, total, acc,
                kv_head, scale, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
                SOFTCAP, BLOCK_N, False, PRECISION, NUM_STAGES,
            )  # fmt: skip
            top, total, acc = _over_fresh(
                query, fresh, first_token, whole, tile_end, last_key, computed, top, total, acc,
                kv_head, scale, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM,
                SOFTCAP, BLOCK_N, True, PRECISION, NUM_STAGES,
            )  # fmt: skip

    top, total, acc = with_sink(top, total, acc, sinks_ptr, head, HAS_SINKS)
    at = token * stride_out + head * HEAD_DIM
    result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + column[None, :], result, mask=mask)
    if HAS_LSE:
        lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + token * NUM_HEADS + head, lse, mask=is_live)
