"""One launch for all rows of a step, with lengths read on the device.

A program has a part of a head's state of one row and takes the row's tokens one by one. Where rows
may be long, and without batch_invariant, a launch before it turns runs of their tokens into
products of matrices, as "chunked" does. The last states of a row are all kept, so the second launch
makes them; it goes on from the state that it finds at the position before its own first token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pelton.ops.gumbel_argmax.triton_noise import two_atanh
from pelton.ops.recurrent import RecurrentMetadata
from pelton.ops.registry import Kernel
from pelton.ops.selective_scan import ScanSignature

# Steps whose rows have no more tokens than this go one by one.
FEW = 16
TOKEN_BLOCK_P = 32


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """chunk: tokens. block_p: of a head's P. operand, precision: of products."""

    chunk: int
    block_p: int
    num_warps: int
    operand: Any
    precision: str


TILES = {
    torch.bfloat16: ChunkTile(32, 64, 4, tl.bfloat16, "ieee"),
    torch.float16: ChunkTile(32, 64, 8, tl.float32, "tf32"),
    torch.float32: ChunkTile(16, 32, 4, tl.float32, "ieee"),
}


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to float32's last bits, also where it is small."""
    e = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + two_atanh(e / (2 + e))


@triton.jit
def _num_chunked(length, ring):
    """Tokens of a row that go in runs: none of a short one."""
    count = length - tl.minimum(ring - 1, length)
    return tl.where(count < 8, 0, count)


@triton.jit
def _state_of(states, slot, position, ring, stride_slot, stride_ring):
    """Where a row's state after a position begins."""
    return states + slot * stride_slot + (position + ring) % ring * stride_ring


@triton.jit(do_not_specialize=["ring"])
def scan_chunks(
    tensors,
    rows,
    weights,
    ring,
    limits,
    strides,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All but the last tokens of long rows, CHUNK at a time, and the state after them. Program:
    (head and part of its P, row). Products have operands of type OPERAND."""
    x, dt, b, c, states, out = tensors
    idx_mapping, query_start_loc, seq_lens = rows
    a_log, d, dt_bias = weights
    low, high = limits
    stride_x, stride_dt, stride_b, stride_c, stride_out, stride_slot, stride_ring = strides
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1)
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    first = tl.load(query_start_loc + row)
    length = tl.load(query_start_loc + row + 1) - first
    start = tl.load(seq_lens + row) - length
    slot = tl.load(idx_mapping + row).to(tl.int64)
    count = _num_chunked(length, ring)
    if count == 0:
        return

    is_state = in_p[:, None] & in_n[None, :]
    states += head * (P * N)
    inner = p[:, None] * N + n[None, :]
    before = _state_of(states, slot, start - 1, ring, stride_slot, stride_ring)
    # What lies in a fresh row's ring may be anything, NaN too.
    state = tl.load(before + inner, mask=is_state & (start > 0), other=0.0)
    rate = -tl.exp(tl.load(a_log + head))
    skip = tl.load(d + head)
    bias = tl.load(dt_bias + head)
    x += first.to(tl.int64) * stride_x + head * P
    dt += first.to(tl.int64) * stride_dt + head
    b += first.to(tl.int64) * stride_b + head // HEADS_PER_GROUP * N
    c += first.to(tl.int64) * stride_c + head // HEADS_PER_GROUP * N
    out += first.to(tl.int64) * stride_out + head * P
    place = tl.arange(0, CHUNK)
    for begin in range(0, count, CHUNK):
        tokens = begin + place
        inside = tokens < count
        is_value = inside[:, None] & in_p[None, :]
        is_key = inside[:, None] & in_n[None, :]
        bs = tl.load(b + tokens[:, None] * stride_b + n[None, :], mask=is_key, other=0.0)
        cs = tl.load(c + tokens[:, None] * stride_c + n[None, :], mask=is_key, other=0.0)
        raw = tl.load(dt + tokens * stride_dt, mask=inside, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(_softplus(raw + bias), low), high)
        step = tl.where(inside, step, 0.0)
        # Sums of log decays are large, and their differences matter: two float32 for each.
        decays = (step * rate).to(tl.float64)
        sums = tl.cumsum(decays, 0)
        whole = tl.sum(decays, 0)
        high_sums = sums.to(tl.float32)
        low_sums = (sums - high_sums.to(tl.float64)).to(tl.float32)
        until_end = tl.exp((whole - sums).to(tl.float32))
        scores = tl.dot(cs, tl.trans(bs), input_precision=PRECISION)
        apart = high_sums[:, None] - high_sums[None, :]
        apart += low_sums[:, None] - low_sums[None, :]
        scores *= tl.exp(tl.where(place[:, None] >= place[None, :], apart, float("-inf")))
        result = tl.dot(cs.to(OPERAND), tl.trans(state.to(OPERAND)), input_precision=PRECISION)
        result *= tl.exp(high_sums)[:, None]
        xs = tl.load(x + tokens[:, None] * stride_x + p[None, :], mask=is_value, other=0.0)
        xs = xs.to(tl.float32)
        scaled = xs * step[:, None]
        result = tl.dot(scores.to(OPERAND), scaled.to(OPERAND), result, input_precision=PRECISION)
        result += xs * skip
        tl.store(
            out + tokens[:, None] * stride_out + p[None, :],
            result.to(out.dtype.element_ty),
            mask=is_value,
        )
        kept = (scaled * until_end[:, None]).to(OPERAND)
        state *= tl.exp(whole.to(tl.float32))
        state = tl.dot(tl.trans(kept), bs.to(OPERAND), state, input_precision=PRECISION)
    after = _state_of(states, slot, start + count - 1, ring, stride_slot, stride_ring)
    tl.store(after + inner, state, mask=is_state)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "ring"])
def scan_tokens(
    tensors,
    rows,
    weights,
    num_rows,
    num_tokens,
    ring,
    limits,
    strides,
    HEADS_PER_GROUP: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CHUNKS: tl.constexpr,
):
    """A row's tokens, one by one; with HAS_CHUNKS those that scan_chunks has left. Padding tokens
    get 0. Program: (head and part of its P, row)."""
    x, dt, b, c, states, out = tensors
    idx_mapping, query_start_loc, seq_lens = rows
    a_log, d, dt_bias = weights
    low, high = limits
    stride_x, stride_dt, stride_b, stride_c, stride_out, stride_slot, stride_ring = strides
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    head = tl.program_id(0) // PARTS
    row = tl.program_id(1)
    p = tl.program_id(0) % PARTS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    first = tl.load(query_start_loc + row)
    length = tl.load(query_start_loc + row + 1) - first
    start = tl.load(seq_lens + row) - length
    slot = tl.load(idx_mapping + row).to(tl.int64)
    x += head * P + p
    dt += head
    b += head // HEADS_PER_GROUP * N + n
    c += head // HEADS_PER_GROUP * N + n
    out += head * P + p

    if row == num_rows - 1:
        end = first.to(tl.int64) + length
        for i in range(num_tokens - first - length):
            tl.store(out + (end + i) * stride_out, tl.zeros([BLOCK_P], tl.float32), mask=in_p)
    done = 0
    if HAS_CHUNKS:
        done = _num_chunked(length, ring)
    if length == done:
        return

    is_state = in_p[:, None] & in_n[None, :]
    states += head * (P * N)
    inner = p[:, None] * N + n[None, :]
    before = _state_of(states, slot, start + done - 1, ring, stride_slot, stride_ring)
    state = tl.load(before + inner, mask=is_state & (start + done > 0), other=0.0)
    rate = -tl.exp(tl.load(a_log + head))
    skip = tl.load(d + head)
    bias = tl.load(dt_bias + head)
    for t in range(done, length):
        token = first.to(tl.int64) + t
        raw = tl.load(dt + token * stride_dt).to(tl.float32)
        xs = tl.load(x + token * stride_x, mask=in_p, other=0.0).to(tl.float32)
        bs = tl.load(b + token * stride_b, mask=in_n, other=0.0).to(tl.float32)
        cs = tl.load(c + token * stride_c, mask=in_n, other=0.0).to(tl.float32)
        step = tl.minimum(tl.maximum(_softplus(raw + bias), low), high)
        state = state * tl.exp(step * rate) + (xs * step)[:, None] * bs[None, :]
        result = tl.sum(state * cs[None, :], 1) + xs * skip
        tl.store(out + token * stride_out, result.to(out.dtype.element_ty), mask=in_p)
        if length - 1 - t < ring:
            after = _state_of(states, slot, start + t, ring, stride_slot, stride_ring)
            tl.store(after + inner, state, mask=is_state)


def selective_scan(
    signature: ScanSignature, a_log: torch.Tensor, d: torch.Tensor, dt_bias: torch.Tensor
) -> Kernel:
    num_heads, head_dim = signature.num_heads, signature.head_dim
    weights = tuple(weight.to(torch.float32) for weight in (a_log, d, dt_bias))
    low, high = signature.dt_limits
    limits = float(low), float(high)
    tile = TILES[signature.dtype]
    whole_p = max(16, triton.next_power_of_2(head_dim))
    sizes = {
        "HEADS_PER_GROUP": num_heads // signature.num_groups,
        "P": head_dim,
        "N": signature.state_size,
        "BLOCK_N": max(16, triton.next_power_of_2(signature.state_size)),
    }

    def grid(block_p: int, num_rows: int) -> tuple[int, int]:
        return num_heads * triton.cdiv(head_dim, block_p), num_rows

    def kernel(
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        states: torch.Tensor,
        meta: RecurrentMetadata,
        out: torch.Tensor,
    ) -> None:
        num_rows, num_tokens = len(meta.seq_lens), len(out)
        if not num_rows:
            out.zero_()
            return
        tensors = (x, dt, b, c, states, out)
        rows = (meta.idx_mapping, meta.query_start_loc, meta.seq_lens)
        strides = (
            *(t.stride(0) for t in (x, dt, b, c, out)), states.stride(0), states.stride(1)
        )  # fmt: skip
        has_chunks = not signature.batch_invariant and meta.max_query_len > FEW
        if has_chunks:
            block_p = min(whole_p, tile.block_p)
            scan_chunks[grid(block_p, num_rows)](
                tensors, rows, weights, meta.ring, limits, strides, **sizes,
                BLOCK_P=block_p, CHUNK=tile.chunk, OPERAND=tile.operand, PRECISION=tile.precision,
                num_warps=tile.num_warps, num_stages=1,
            )  # fmt: skip
        block_p = min(whole_p, TOKEN_BLOCK_P)
        scan_tokens[grid(block_p, num_rows)](
            tensors, rows, weights, num_rows, num_tokens, meta.ring, limits, strides, **sizes,
            BLOCK_P=block_p, HAS_CHUNKS=has_chunks, num_warps=4,
        )  # fmt: skip

    return kernel
