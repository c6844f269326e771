"""Triton kernels of the product ops, for a Hopper GPU and few rows of input.

With few rows a product is a stream of weights through memory, and everything else must hide
behind it. `one_row` holds tiles of weights in registers and multiplies them by one row of x; RMS
norm, bias, gate and residual are done on the way. `few_rows` copies weights to shared memory,
several tiles ahead, for the matrix units. Both may be launched while the kernel before them still
runs (programmatic dependent launch): what they read before `gdc_wait` was there before that kernel.

DEPENDS: whether it is launched so; needs compute capability 9.0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _tile(
    pointer,
    rows,
    start,
    num_rows,
    num_columns,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    POLICY: tl.constexpr,
):
    """[len(rows), BLOCK_K] of a matrix, from column `start` on; zeros past its end."""
    columns = start + tl.arange(0, BLOCK_K)
    place = pointer + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    if IS_WHOLE:
        return tl.load(place, eviction_policy=POLICY)
    else:
        mask = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
        return tl.load(place, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _folded(product, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Sums of 8 neighbours, which one thread has: an eighth of the registers."""
    return tl.sum(tl.reshape(product, [BLOCK_N, BLOCK_K // 8, 8]), 2)


@triton.jit
def _activated(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu_tanh_mul":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
        return 0.5 * gate * (1.0 + tanh) * up
    elif ACTIVATION == "gelu_mul":
        return 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate)) * up
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def one_row(
    x,
    weight,
    norm_weight,
    bias,
    out,
    num_features,
    num_columns,
    eps,
    IS_ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_MORE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """x [K], weight [N, K] -> out [N], or [N / 2] with an activation; a program makes BLOCK_N.

    The norm's scale is the same for all products of a row, so it is multiplied at the end.
    """
    if DEPENDS:
        gdc_launch_dependents()
    IS_GATED: tl.constexpr = ACTIVATION != ""
    num_out = num_features // 2 if IS_GATED else num_features
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.zeros([1], tl.int32)
    w = _tile(weight, rows, 0, num_out, num_columns, BLOCK_K, IS_WHOLE, "evict_first")
    if IS_GATED:
        u = _tile(
            weight, rows + num_out, 0, num_features, num_columns, BLOCK_K, IS_WHOLE, "evict_first"
        )
    if HAS_NORM:
        g = _tile(norm_weight, first, 0, 1, num_columns, BLOCK_K, IS_WHOLE, "")
    if DEPENDS:
        gdc_wait()
    x32 = _tile(x, first, 0, 1, num_columns, BLOCK_K, IS_WHOLE, "").to(tl.float32)
    if HAS_NORM:
        squares = x32 * x32
        x32 *= g.to(tl.float32)
    total = _folded(w.to(tl.float32) * x32, BLOCK_N, BLOCK_K)
    if IS_GATED:
        total_up = _folded(u.to(tl.float32) * x32, BLOCK_N, BLOCK_K)
    # Not a loop of no rounds, whose registers would count.
    if HAS_MORE:
        for k in range(BLOCK_K, num_columns, BLOCK_K):
            w = _tile(weight, rows, k, num_out, num_columns, BLOCK_K, IS_WHOLE, "evict_first")
            if IS_GATED:
                u = _tile(
                    weight, rows + num_out, k, num_features, num_columns, BLOCK_K, IS_WHOLE,
                    "evict_first",
                )  # fmt: skip
            x32 = _tile(x, first, k, 1, num_columns, BLOCK_K, IS_WHOLE, "").to(tl.float32)
            if HAS_NORM:
                g = _tile(norm_weight, first, k, 1, num_columns, BLOCK_K, IS_WHOLE, "")
                squares += x32 * x32
                x32 *= g.to(tl.float32)
            total += _folded(w.to(tl.float32) * x32, BLOCK_N, BLOCK_K)
            if IS_GATED:
                total_up += _folded(u.to(tl.float32) * x32, BLOCK_N, BLOCK_K)
    result = tl.sum(total, 1)
    if IS_GATED:
        up = tl.sum(total_up, 1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares) / num_columns + eps)
        result *= scale
        if IS_GATED:
            up *= scale
    mask = rows < num_out
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=mask, other=0.0).to(tl.float32)
        if IS_GATED:
            up += tl.load(bias + num_out + rows, mask=mask, other=0.0).to(tl.float32)
    if IS_GATED:
        result = _activated(result, up, ACTIVATION)
    if IS_ADDED:
        result += tl.load(out + rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _weights(
    weight,
    descriptor,
    rows,
    first_row,
    start,
    num_rows,
    num_columns,
    BLOCK_K: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
):
    if HAS_DESCRIPTOR:
        return descriptor.load([first_row, start])
    else:
        return _tile(weight, rows, start, num_rows, num_columns, BLOCK_K, IS_WHOLE, "evict_first")


@triton.jit
def _fetch(pointer, rows, start, num_rows, num_columns, LINES: tl.constexpr):
    """Ask for LINES x 128 bytes of each row, so that they are in L2 when they are needed."""
    LINE: tl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth
    inside = tl.minimum(rows, num_rows - 1).to(tl.int64)
    columns = tl.minimum(start + tl.arange(0, LINES) * LINE, num_columns - 1)
    place = (pointer + inside[:, None] * num_columns + columns[None, :]).to(tl.uint64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [place],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["num_rows"])
def few_rows(
    x,
    x_descriptor,
    weight,
    descriptor,
    bias,
    out,
    parts,
    arrived,
    num_features,
    num_columns,
    num_rows,
    x_stride,
    out_stride,
    IS_ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_DESCRIPTOR: tl.constexpr,
    HAS_X_DESCRIPTOR: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """x [T, K], weight [N, K] -> out [T, N], or [T, N / 2] with an activation.

    A program makes a tile [BLOCK_T, BLOCK_N] of a SPLITS-th of the columns. The last of a tile's
    programs to arrive adds up all parts in their order, so sums depend on no timing. Every element
    is one chain of sums over K, whatever BLOCK_T is.

    parts: float32 [tiles, SPLITS, 1 or 2 (gate, up), BLOCK_N, BLOCK_T]; arrived: int32 [tiles], 0
    before and after.
    """
    if DEPENDS:
        gdc_launch_dependents()
    IS_GATED: tl.constexpr = ACTIVATION != ""
    num_out = num_features // 2 if IS_GATED else num_features
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first_row = tl.program_id(1) * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    blocks = tl.cdiv(num_columns, BLOCK_K)
    start = split * blocks // SPLITS * BLOCK_K
    end = (split + 1) * blocks // SPLITS * BLOCK_K
    if DEPENDS:
        _fetch(weight, rows, start, num_out, num_columns, 4)
        if IS_GATED:
            _fetch(weight, rows + num_out, start, num_features, num_columns, 4)
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        columns = k + tl.arange(0, BLOCK_K)
        w = _weights(
            weight, descriptor, rows, first_row, k, num_out, num_columns, BLOCK_K, IS_WHOLE,
            HAS_DESCRIPTOR,
        )  # fmt: skip
        if HAS_X_DESCRIPTOR:
            x_tile = x_descriptor.load([tl.program_id(0) * BLOCK_T, k])
        else:
            x_tile = tl.load(
                x + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :],
                mask=(tokens[:, None] < num_rows) & (IS_WHOLE | (columns[None, :] < num_columns)),
                other=0.0,
            )
        total = tl.dot(w, tl.trans(x_tile), total, input_precision="ieee")
        if IS_GATED:
            u = _weights(
                weight, descriptor, rows + num_out, first_row + num_out, k, num_features,
                num_columns, BLOCK_K, IS_WHOLE, HAS_DESCRIPTOR,
            )  # fmt: skip
            up = tl.dot(u, tl.trans(x_tile), up, input_precision="ieee")
    if SPLITS > 1:
        PART: tl.constexpr = BLOCK_N * BLOCK_T
        SIZE: tl.constexpr = 2 * PART if IS_GATED else PART
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        mine = parts + (tile.to(tl.int64) * SPLITS + split) * SIZE
        tl.store(mine + inner, total)
        if IS_GATED:
            tl.store(mine + PART + inner, up)
        # All threads have stored before one of them says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if before != SPLITS - 1:
            return
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for i in tl.static_range(SPLITS):
            part = parts + (tile.to(tl.int64) * SPLITS + i) * SIZE
            total += tl.load(part + inner, cache_modifier=".cg")
            if IS_GATED:
                up += tl.load(part + PART + inner, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=rows < num_out, other=0.0).to(tl.float32)[:, None]
        if IS_GATED:
            up_bias = tl.load(bias + num_out + rows, mask=rows < num_out, other=0.0)
            up += up_bias.to(tl.float32)[:, None]
    if IS_GATED:
        total = _activated(total, up, ACTIVATION)
    mask = (rows[:, None] < num_out) & (tokens[None, :] < num_rows)
    place = out + tokens[None, :].to(tl.int64) * out_stride + rows[:, None]
    if IS_ADDED:
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm(
    x,
    norm_weight,
    out,
    num_columns,
    x_stride,
    eps,
    BLOCK_K: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """x [T, K] -> out [T, K], contiguous; a program per row, of which BLOCK_K holds all."""
    if DEPENDS:
        gdc_launch_dependents()
    columns = tl.arange(0, BLOCK_K)
    inside = columns < num_columns
    g = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    if DEPENDS:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x32 = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x32 * x32) / num_columns + eps)
    tl.store(
        out + row * num_columns + columns, (x32 * scale * g).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def activate(
    both,
    out,
    num_out,
    both_stride,
    out_stride,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """both [T, 2 N]: gate, up -> out [T, N]."""
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < num_out
    place = both + row * both_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + num_out, mask=inside, other=0.0).to(tl.float32)
    result = _activated(gate, up, ACTIVATION)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
