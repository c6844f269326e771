"""Four launches for few candidates. Of a row that is cut into tiles, the k-th largest maximum of
a tile is no more than the k-th largest value: whatever reaches it is a candidate, and few others
do. These are put aside in any order, and sorted. Where many are equal a row has too many
candidates, and its own program looks for the last that stays, as ops/keep_top does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.keep_top.triton_order import (
    LOWEST,
    ids_of,
    keys_of,
    last_rank,
    mass_of,
    ranked,
    values_of,
)
from pelton.ops.top_k_top_p import MAX_CANDIDATES

_TILE, _TILES = 64, 32  # values of a tile; tiles of a program
_ROOMS = (128, 2 * MAX_CANDIDATES)


@triton.jit
def tile_maxima(logits, maxima, stride, num_tiles, V, TILE: tl.constexpr, TILES: tl.constexpr):
    """maxima: [rows, num_tiles] uint32 keys. Program: (row, TILES tiles)."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * TILES + tl.arange(0, TILES)
    columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(logits + row * stride + columns, mask=columns < V, other=float("-inf"))
    keys = tl.where(columns < V, keys_of(values), 0)
    tl.store(maxima + row * num_tiles + tiles, tl.max(keys, 1), mask=tiles < num_tiles)


@triton.jit
def lower_bound(maxima, top_k, bounds, counts, num_tiles, BLOCK: tl.constexpr):
    """bounds: [rows], a key that top_k values reach; the upper 16 bits will do. Program: row."""
    row = tl.program_id(0)
    k = tl.maximum(tl.load(top_k + row), 1)
    tiles = tl.arange(0, BLOCK)
    keys = tl.load(maxima + row * num_tiles + tiles, mask=tiles < num_tiles, other=0)
    keys = keys.to(tl.uint32, bitcast=True)
    bound = tl.zeros([], tl.uint32)
    for step in range(16):
        higher = bound + (tl.full([], 1, tl.uint32) << (31 - step))
        reach = tl.sum(((keys >= higher) & (tiles < num_tiles)).to(tl.int32))
        bound = tl.where(reach >= k, higher, bound)
    tl.store(bounds + row, bound.to(tl.int32, bitcast=True))
    tl.store(counts + row, 0)


@triton.jit
def gather(
    logits,
    bounds,
    found,
    counts,
    stride,
    V,
    ROOM: tl.constexpr,
    KEEPS_DROPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """found: [rows, ROOM] int64, what reaches the bound, as far as there is room; counts: how much
    does. Program: (row, BLOCK values)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + columns, mask=columns < V, other=float("-inf"))
    keys = keys_of(values)
    bound = tl.load(bounds + row).to(tl.uint32, bitcast=True)
    reaches = (keys >= bound) & (columns < V)
    if not KEEPS_DROPPED:
        # What a stage before has dropped is no candidate, however few others there are.
        reaches = reaches & (values != float("-inf"))
    reaches = reaches.to(tl.int32)
    count = tl.sum(reaches)
    if count > 0:
        place = tl.atomic_add(counts + row, count) + tl.cumsum(reaches, 0) - 1
        tl.store(
            found + row * ROOM + place, ranked(keys, columns), mask=(reaches > 0) & (place < ROOM)
        )


@triton.jit(do_not_specialize=["C", "out_stride"])
def choose(
    logits,
    found,
    counts,
    top_k,
    top_p,
    out_values,
    out_ids,
    stride,
    out_stride,
    V: tl.constexpr,
    C,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program: row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.minimum(tl.maximum(tl.load(top_k + row), 1), V)
    p = tl.load(top_p + row)
    found += row * ROOM
    count = tl.load(counts + row)
    if count > ROOM:
        logits += row * stride
        last = last_rank(logits, k.to(tl.float64), 0.0, V, False, BLOCK)
        count = tl.zeros([], tl.int32)
        for start in range(0, V, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(logits + columns, mask=columns < V, other=float("-inf"))
            ranks = ranked(keys_of(values), columns)
            stays = ((columns < V) & (ranks >= last)).to(tl.int32)
            tl.store(found + count + tl.cumsum(stays, 0) - 1, ranks, mask=stays > 0)
            count += tl.sum(stays)
        tl.debug_barrier()
    rank = tl.arange(0, ROOM)
    ranks = tl.load(found + rank, mask=rank < count, other=LOWEST)
    ranks = tl.sort(ranks, descending=True)
    ids = ids_of(ranks)
    values = values_of(ranks)
    values = tl.where(rank < count, values, float("-inf"))
    ids = tl.where(rank < count, ids, 0)
    in_k = (rank < k) & (rank < count)
    best = tl.sum(tl.where(rank == 0, values, 0.0))
    weights = tl.where(in_k, mass_of(values, best), 0)
    mass = tl.cumsum(weights, 0)
    goal = tl.sum(weights).to(tl.float64) * tl.where(p < 1, p, float("inf")).to(tl.float64)
    in_p = tl.where(rank == 0, 1, ((mass - weights).to(tl.float64) < goal).to(tl.int32))
    values = tl.where(in_k & (in_p > 0), values, float("-inf"))
    tl.store(out_values + row * out_stride + rank, values, mask=rank < C)
    tl.store(out_ids + row * out_stride + rank, ids, mask=rank < C)


def top_k_top_p(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    out_values: torch.Tensor,
    out_ids: torch.Tensor,
    *,
    keeps_dropped: bool = False,
) -> None:
    """At most MAX_CANDIDATES candidates. keeps_dropped: with the ids of logits of -inf, too, each
    once, where there are not enough others."""
    num_rows, vocab_size = logits.shape
    num_candidates = out_values.shape[1]
    assert num_candidates <= MAX_CANDIDATES
    assert out_values.stride() == out_ids.stride()
    # Most often few more than asked for reach the bound.
    room = next(room for room in _ROOMS if 2 * num_candidates <= room)
    num_tiles = triton.cdiv(vocab_size, _TILE)
    maxima = logits.new_empty((num_rows, num_tiles), dtype=torch.int32)
    # Not one of both: kernels are compiled for how addresses are aligned.
    bounds = logits.new_empty(num_rows, dtype=torch.int32)
    counts = torch.empty_like(bounds)
    found = logits.new_empty((num_rows, room), dtype=torch.int64)
    stride = logits.stride(0)
    tile_maxima[(num_rows, triton.cdiv(num_tiles, _TILES))](
        logits, maxima, stride, num_tiles, vocab_size, TILE=_TILE, TILES=_TILES
    )
    block = triton.next_power_of_2(num_tiles)
    lower_bound[(num_rows,)](
        maxima, top_k, bounds, counts, num_tiles, BLOCK=block,
        num_warps=min(8, max(1, block // 128)),
    )  # fmt: skip
    width = _TILE * _TILES
    gather[(num_rows, triton.cdiv(vocab_size, width))](
        logits,
        bounds,
        found,
        counts,
        stride,
        vocab_size,
        ROOM=room,
        KEEPS_DROPPED=keeps_dropped,
        BLOCK=width,
    )
    choose[(num_rows,)](
        logits, found, counts, top_k, top_p, out_values, out_ids, stride, out_values.stride(0),
        V=vocab_size, C=num_candidates, ROOM=room, BLOCK=width,
        num_warps=4 if room == _ROOMS[0] else 8,
    )  # fmt: skip
