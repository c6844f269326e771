"""Many tokens: pairs of a token and one of its experts, in the order of the experts.

Each expert's pairs begin at a tile of their own, so a tile has one expert; what fills a tile up is
pair P, of which there is none. Nobody knows on the host how many tiles a step has: programs past
the last one return.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton.ops.moe.triton_kernels import activated, chosen_of


@triton.jit(do_not_specialize=["num_tokens"])
def choose_slots(
    logits,
    weights,
    experts,
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """logits [T, E] -> weights [T, TOP_K] float32 and experts [T, TOP_K] int32, ascending."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    every = tl.arange(0, BLOCK_E)
    exists = tokens < num_tokens
    place = tokens[:, None] * E + every[None, :]
    mask = exists[:, None] & (every < E)[None, :]
    values = tl.load(logits + place, mask=mask, other=float("-inf"))
    shares, chosen = chosen_of(values, exists, every, E, TOP_K, NORMALISE)
    slot = tokens[:, None] * TOP_K + tl.cumsum(chosen.to(tl.int32), 1) - 1
    tl.store(weights + slot, shares, mask=chosen)
    tl.store(experts + slot, tl.broadcast_to(every[None, :], [BLOCK_T, BLOCK_E]), mask=chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(experts, counts, num_pairs, BLOCK: tl.constexpr, DEPENDS: tl.constexpr):
    """experts [P] -> counts [E]. Program: an expert."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        found = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        total += (found == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total))


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs(
    experts,
    counts,
    pairs,
    tile_experts,
    num_tiles,
    num_pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """-> pairs [tiles * TILE], in order within an expert; tile_experts [tiles]; num_tiles [1].
    Program: an expert."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0)
    every = tl.arange(0, BLOCK_E)
    tiles = tl.cdiv(tl.load(counts + every, mask=every < E, other=0), TILE)
    first = tl.sum(tl.where(every < expert, tiles, 0))
    own = tl.sum(tl.where(every == expert, tiles, 0))
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles))
    for start in range(0, own, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        tl.store(tile_experts + first + tile, tl.zeros_like(tile) + expert, mask=tile < own)
    mine = pairs + first * TILE
    done = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        is_mine = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert
        rank = done + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(mine + rank, pair, mask=is_mine)
        done += tl.sum(is_mine.to(tl.int32))
    filler = done + tl.arange(0, TILE)
    tl.store(mine + filler, tl.zeros_like(filler) + num_pairs, mask=filler < own * TILE)


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_sorted(
    x,
    gate_up,
    bias,
    pairs,
    tile_experts,
    num_tiles,
    inner,
    num_pairs,
    x_stride,
    H: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """x [T, H] -> inner [tiles * TILE, INNER]. Programs: a tile's columns side by side, so that its
    tokens, and an expert's weights, stay in L2."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    COLUMN_TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // COLUMN_TILES
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    rows = (tl.program_id(0) % COLUMN_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(rows, INNER - 1)
    at = tile * TILE + tl.arange(0, TILE)
    pair = tl.load(pairs + at)
    exists = pair < num_pairs
    x_rows = x + (tl.where(exists, pair, 0) // TOP_K).to(tl.int64)[:, None] * x_stride
    gate_rows = gate_up + (expert * (2 * INNER) + safe)[:, None] * H
    up_rows = gate_rows + INNER * H
    gate = tl.zeros([BLOCK_N, TILE], tl.float32)
    up = tl.zeros([BLOCK_N, TILE], tl.float32)
    for k in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        if H % BLOCK_K == 0:
            g = tl.load(gate_rows + columns[None, :])
            u = tl.load(up_rows + columns[None, :])
            x_tile = tl.load(x_rows + columns[None, :])
        else:
            is_column = (columns < H)[None, :]
            g = tl.load(gate_rows + columns[None, :], mask=is_column, other=0.0)
            u = tl.load(up_rows + columns[None, :], mask=is_column, other=0.0)
            x_tile = tl.load(x_rows + columns[None, :], mask=is_column, other=0.0)
        gate = tl.dot(g, tl.trans(x_tile), gate, input_precision="ieee")
        up = tl.dot(u, tl.trans(x_tile), up, input_precision="ieee")
    if HAS_BIAS:
        place = bias + expert * (2 * INNER) + safe
        gate += tl.load(place).to(tl.float32)[:, None]
        up += tl.load(place + INNER).to(tl.float32)[:, None]
    result = activated(gate, up, LIMIT, ALPHA).to(inner.dtype.element_ty)
    place = inner + at.to(tl.int64)[None, :] * INNER + rows[:, None]
    tl.store(place, result, mask=(rows < INNER)[:, None])


@triton.jit(do_not_specialize=["num_pairs"])
def down_sorted(
    inner,
    down,
    bias,
    weights,
    pairs,
    tile_experts,
    num_tiles,
    results,
    num_pairs,
    H: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """inner [tiles * TILE, INNER] -> results [P, H], times each pair's weight [P]."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    COLUMN_TILES: tl.constexpr = (H + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // COLUMN_TILES
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    rows = (tl.program_id(0) % COLUMN_TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe = tl.minimum(rows, H - 1)
    at = tile * TILE + tl.arange(0, TILE)
    pair = tl.load(pairs + at)
    exists = pair < num_pairs
    x_rows = inner + at.to(tl.int64)[:, None] * INNER
    w_rows = down + (expert * H + safe)[:, None] * INNER
    total = tl.zeros([BLOCK_N, TILE], tl.float32)
    for k in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        if INNER % BLOCK_K == 0:
            w = tl.load(w_rows + columns[None, :])
            x_tile = tl.load(x_rows + columns[None, :])
        else:
            is_column = (columns < INNER)[None, :]
            w = tl.load(w_rows + columns[None, :], mask=is_column, other=0.0)
            x_tile = tl.load(x_rows + columns[None, :], mask=is_column, other=0.0)
        total = tl.dot(w, tl.trans(x_tile), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + expert * H + safe).to(tl.float32)[:, None]
    share = tl.load(weights + pair, mask=exists, other=0.0)
    result = (total * share[None, :]).to(results.dtype.element_ty)
    place = results + pair.to(tl.int64)[None, :] * H + rows[:, None]
    tl.store(place, result, mask=(rows < H)[:, None] & exists[None, :])


@triton.jit
def add_slots(
    results,
    out,
    out_stride,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """results [T * TOP_K, H] -> out [T, H]: the sum of a token's."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        place = results + (token * TOP_K + slot) * H + columns
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + columns, total.to(out.dtype.element_ty), mask=inside)
