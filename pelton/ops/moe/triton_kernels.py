"""Few tokens through the experts that any of them picks, a step's weights read once.

All of up to BLOCK_T tokens go through each picked expert; whom it is not for has weight 0 there.
So nothing is sorted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

NO_EXPERT = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_tokens"])
def router_logits(
    x,
    router,
    bias,
    logits,
    num_tokens,
    x_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """x [T, H], router [E, H] -> logits [SPLITS, T, E] float32, whose sum over the first axis it
    is: each of a SPLITS-th of the columns."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = tokens < num_tokens
    inside = experts < E
    total = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    blocks = tl.cdiv(H, BLOCK_K)
    split = tl.program_id(2)
    start = split * blocks // SPLITS * BLOCK_K
    end = (split + 1) * blocks // SPLITS * BLOCK_K
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        is_column = columns < H
        w_place = router + experts[:, None] * H + columns[None, :]
        w = tl.load(w_place, mask=inside[:, None] & is_column[None, :], other=0.0)
        x_place = x + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :]
        x_tile = tl.load(x_place, mask=exists[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(w, tl.trans(x_tile), total, input_precision="ieee")
    if HAS_BIAS:
        added = tl.load(bias + experts, mask=inside & (split == 0), other=0.0)
        total += added.to(tl.float32)[:, None]
    place = logits + (split * num_tokens + tokens[None, :]) * E + experts[:, None]
    tl.store(place, total, mask=exists[None, :] & inside[:, None])


@triton.jit
def chosen_of(
    logits, exists, experts, E: tl.constexpr, TOP_K: tl.constexpr, NORMALISE: tl.constexpr
):
    """logits [T, E'] -> weights of each token's TOP_K experts, 0 elsewhere; and who they are."""
    is_real = exists[:, None] & (experts < E)[None, :]
    left = tl.where(is_real, logits, float("-inf"))
    chosen = is_real & (experts < 0)[None, :]
    for _ in tl.static_range(TOP_K):
        best = tl.max(left, 1)
        ties = (left == best[:, None]) & is_real & (chosen == 0)
        first = tl.min(tl.where(ties, experts[None, :], NO_EXPERT), 1)
        hit = experts[None, :] == first[:, None]
        chosen = chosen | hit
        left = tl.where(hit, float("-inf"), left)
    # A token with NaN among its logits stays broken, whomever it goes to.
    is_nan = tl.max((is_real & (logits != logits)).to(tl.int32), 1) > 0
    broken = is_nan[:, None] & (experts < TOP_K)[None, :]
    chosen = (chosen & (is_nan == 0)[:, None]) | broken
    counted = chosen if NORMALISE else is_real
    values = tl.where(is_real, logits, float("-inf"))
    top = tl.max(values, 1)
    powers = tl.where(counted, tl.exp(values - tl.where(exists, top, 0.0)[:, None]), 0.0)
    mass = tl.sum(powers, 1)
    weights = powers / tl.where(exists, mass, 1.0)[:, None]
    weights = tl.where(chosen, weights, 0.0)
    return tl.where(broken, float("nan"), weights), chosen & exists[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def choose(
    logits,
    weights,
    picked,
    num_picked,
    num_tokens,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """logits [SPLITS, T, E] -> weights [T, E] float32; picked [E] int32, the first num_picked [1]
    of which are the experts that any token picks, ascending."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.arange(0, BLOCK_T)
    experts = tl.arange(0, BLOCK_E)
    exists = tokens < num_tokens
    inside = experts < E
    place = tokens[:, None] * E + experts[None, :]
    mask = exists[:, None] & inside[None, :]
    values = tl.load(logits + place, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        values += tl.load(logits + split * num_tokens * E + place, mask=mask, other=0.0)
    shares, chosen = chosen_of(values, exists, experts, E, TOP_K, NORMALISE)
    tl.store(weights + place, shares, mask=mask)
    used = tl.max(chosen.to(tl.int32), 0)
    rank = tl.cumsum(used, 0) - 1
    tl.store(picked + rank, experts, mask=used > 0)
    tl.store(num_picked, tl.sum(used))


@triton.jit
def activated(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, up)
        up = tl.where(up < -LIMIT, -LIMIT, up)
        return (up + 1) * gate / (1.0 + tl.exp(-ALPHA * gate))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["num_tokens"])
def gate_up_few(
    x,
    gate_up,
    bias,
    weights,
    picked,
    num_picked,
    inner,
    num_tokens,
    x_stride,
    H: tl.constexpr,
    INNER: tl.constexpr,
    E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """x [T, H] -> inner [num_picked, BLOCK_T, INNER]: each expert's activation of each token,
    times its weight. Program: (picked expert, tile of INNER)."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0)
    if at >= tl.load(num_picked):
        return
    expert = tl.load(picked + at).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    tokens = tl.arange(0, BLOCK_T)
    exists = tokens < num_tokens
    # Rows past the end repeat the last one, and are not stored.
    safe = tl.minimum(rows, INNER - 1)
    gate_rows = gate_up + (expert * (2 * INNER) + safe)[:, None] * H
    up_rows = gate_rows + INNER * H
    x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
    gate = tl.zeros([BLOCK_I, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_I, BLOCK_T], tl.float32)
    for k in tl.range(0, H, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        if H % BLOCK_K == 0:
            g = tl.load(gate_rows + columns[None, :], eviction_policy="evict_first")
            u = tl.load(up_rows + columns[None, :], eviction_policy="evict_first")
            x_tile = tl.load(x_rows + columns[None, :], mask=exists[:, None], other=0.0)
        else:
            is_column = (columns < H)[None, :]
            g = tl.load(gate_rows + columns[None, :], mask=is_column, other=0.0)
            u = tl.load(up_rows + columns[None, :], mask=is_column, other=0.0)
            mask = exists[:, None] & is_column
            x_tile = tl.load(x_rows + columns[None, :], mask=mask, other=0.0)
        gate = tl.dot(g, tl.trans(x_tile), gate, input_precision="ieee")
        up = tl.dot(u, tl.trans(x_tile), up, input_precision="ieee")
    if HAS_BIAS:
        place = bias + expert * (2 * INNER) + safe
        gate += tl.load(place).to(tl.float32)[:, None]
        up += tl.load(place + INNER).to(tl.float32)[:, None]
    share = tl.load(weights + tokens * E + expert, mask=exists, other=0.0)
    result = activated(gate, up, LIMIT, ALPHA) * share[None, :]
    # What an expert makes of a token that is not its own may be infinite.
    result = tl.where((share == 0.0)[None, :], 0.0, result)
    place = inner + (at * BLOCK_T + tokens)[None, :].to(tl.int64) * INNER + rows[:, None]
    tl.store(place, result.to(inner.dtype.element_ty), mask=(rows < INNER)[:, None])


@triton.jit
def down_few(
    inner,
    down,
    picked,
    num_picked,
    results,
    H: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """inner [num_picked, BLOCK_T, INNER], down [E, H, INNER] -> results [num_picked, BLOCK_T, H]
    float32. Program: (picked expert, tile of H)."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0)
    if at >= tl.load(num_picked):
        return
    expert = tl.load(picked + at).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    tokens = tl.arange(0, BLOCK_T)
    w_rows = down + (expert * H + tl.minimum(rows, H - 1))[:, None] * INNER
    x_rows = inner + (at * BLOCK_T + tokens).to(tl.int64)[:, None] * INNER
    total = tl.zeros([BLOCK_H, BLOCK_T], tl.float32)
    for k in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        if INNER % BLOCK_K == 0:
            w = tl.load(w_rows + columns[None, :], eviction_policy="evict_first")
            x_tile = tl.load(x_rows + columns[None, :])
        else:
            is_column = (columns < INNER)[None, :]
            w = tl.load(w_rows + columns[None, :], mask=is_column, other=0.0)
            x_tile = tl.load(x_rows + columns[None, :], mask=is_column, other=0.0)
        total = tl.dot(w, tl.trans(x_tile), total, input_precision="ieee")
    place = results + (at * BLOCK_T + tokens).to(tl.int64)[None, :] * H + rows[:, None]
    tl.store(place, total, mask=(rows < H)[:, None])


@triton.jit
def add_picked(
    results,
    bias,
    weights,
    picked,
    num_picked,
    out,
    out_stride,
    H: tl.constexpr,
    E: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """results [num_picked, BLOCK_T, H] -> out [T, H]: a token's sum over the experts, the biases
    that its weights bring among them. Program: (token, tile of H)."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    count = tl.load(num_picked)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, count, BLOCK_P):
        at = start + tl.arange(0, BLOCK_P)
        exists = at < count
        expert = tl.load(picked + at, mask=exists, other=0)
        share = tl.load(weights + token * E + expert, mask=exists, other=0.0)
        # Experts that are not the token's have nothing to add.
        mask = (exists & (share != 0.0))[:, None] & inside[None, :]
        place = results + (at * BLOCK_T + token).to(tl.int64)[:, None] * H + columns[None, :]
        added = tl.load(place, mask=mask, other=0.0)
        if HAS_BIAS:
            place = bias + expert.to(tl.int64)[:, None] * H + columns[None, :]
            added += tl.load(place, mask=mask, other=0.0).to(tl.float32) * share[:, None]
        total += tl.sum(added, 0)
    place = out + token.to(tl.int64) * out_stride + columns
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
