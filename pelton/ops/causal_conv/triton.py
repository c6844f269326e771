"""One launch where each row has one token; else one for the tokens and one for the states."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pelton.ops.causal_conv import ConvSignature
from pelton.ops.recurrent import RecurrentMetadata
from pelton.ops.registry import Kernel
from pelton.ops.triton_rows import num_bits, row_of

_CHANNELS, _TOKENS, _SINGLE_TOKENS = 128, 16, 4


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_bits", "ring"])
def convolve(
    x,
    states,
    weight,
    bias,
    out,
    idx_mapping,
    query_start_loc,
    seq_lens,
    num_rows,
    num_tokens,
    num_bits,
    ring,
    C,
    stride_x,
    stride_out,
    stride_slot,
    stride_ring,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SINGLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """weight [C, WIDTH], contiguous. IS_SINGLE: token t is the only one of row t, whose state is
    moved on here."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (channels < C)[None, :]
    is_live = tokens < tl.load(query_start_loc + num_rows)
    row = tokens if IS_SINGLE else row_of(query_start_loc, tokens, num_rows, num_bits)
    first = tl.load(query_start_loc + row, mask=is_live, other=0)
    end = tl.load(query_start_loc + row + 1, mask=is_live, other=0)
    seq_len = tl.load(seq_lens + row, mask=is_live, other=0)
    slot = tl.load(idx_mapping + row, mask=is_live, other=0).to(tl.int64)
    start = seq_len - (end - first)
    STATE: tl.constexpr = WIDTH - 1
    before = slot * stride_slot + (start + ring - 1) % ring * stride_ring
    offset = tokens - first
    wide = tokens.to(tl.int64)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for j in tl.static_range(WIDTH):
        at = offset + (j - STATE)  # of the input, among the row's tokens
        is_token = (is_live & (at >= 0))[:, None] & inside
        is_state = (is_live & (at < 0) & (start > 0))[:, None] & inside
        token = tl.load(
            x + (wide + (j - STATE))[:, None] * stride_x + channels[None, :],
            mask=is_token,
            other=0.0,
        )
        remembered = tl.load(
            states + (before + (at + STATE) * C)[:, None] + channels[None, :],
            mask=is_state,
            other=0.0,
        )
        value = tl.where(is_token, token, remembered).to(tl.float32)
        tap = tl.load(weight + channels * WIDTH + j, mask=channels < C, other=0.0)
        total = tl.fma(value, tl.broadcast_to(tap.to(tl.float32)[None, :], value.shape), total)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=channels < C, other=0.0).to(tl.float32)[None, :]
    total = total / (1 + tl.exp(-total))
    total = tl.where(is_live[:, None], total, 0.0)
    tl.store(
        out + wide[:, None] * stride_out + channels[None, :],
        total.to(out.dtype.element_ty),
        mask=(tokens < num_tokens)[:, None] & inside,
    )
    if IS_SINGLE:
        after = slot * stride_slot + (seq_len + ring - 1) % ring * stride_ring
        is_row = is_live[:, None] & inside
        # In the order of time: what is written has been read.
        for i in tl.static_range(STATE):
            if i + 1 < STATE:
                moved = tl.load(
                    states + (before + (i + 1) * C)[:, None] + channels[None, :],
                    mask=is_row & (start > 0)[:, None],
                    other=0.0,
                )
            else:
                moved = tl.load(
                    x + wide[:, None] * stride_x + channels[None, :], mask=is_row, other=0.0
                )
            tl.store(states + (after + i * C)[:, None] + channels[None, :], moved, mask=is_row)


@triton.jit(do_not_specialize=["ring"])
def move_states(
    x,
    states,
    idx_mapping,
    query_start_loc,
    seq_lens,
    ring,
    C,
    stride_x,
    stride_slot,
    stride_ring,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program: (row, channels). The states after a row's last tokens, when its outputs are made."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < C
    first = tl.load(query_start_loc + row)
    length = tl.load(query_start_loc + row + 1) - first
    seq_len = tl.load(seq_lens + row)
    start = seq_len - length
    slot = tl.load(idx_mapping + row).to(tl.int64)
    STATE: tl.constexpr = WIDTH - 1
    taps = tl.arange(0, BLOCK_W)
    before = states + slot * stride_slot + (start + ring - 1) % ring * stride_ring
    # All of it first: one of the new states takes its place.
    old = tl.load(
        before + (taps * C)[:, None] + channels[None, :],
        mask=(taps < STATE)[:, None] & inside[None, :] & (start > 0),
        other=0.0,
    ).to(tl.float32)
    for back in range(tl.minimum(ring, length)):
        after = states + slot * stride_slot + (seq_len - 1 - back) % ring * stride_ring
        for i in tl.static_range(STATE):
            at = length - back + i - STATE  # among the row's tokens
            token = tl.load(
                x + (first + at).to(tl.int64) * stride_x + channels,
                mask=inside & (at >= 0),
                other=0.0,
            )
            kept = tl.sum(tl.where((taps == at + STATE)[:, None], old, 0.0), 0)
            value = tl.where(at >= 0, token, kept.to(token.dtype))
            tl.store(after + i * C + channels, value, mask=inside)


def causal_conv(
    signature: ConvSignature, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Kernel:
    channels, width = signature.channels, signature.width
    weight = weight.contiguous()

    def kernel(
        x: torch.Tensor, states: torch.Tensor, meta: RecurrentMetadata, out: torch.Tensor
    ) -> None:
        num_rows, num_tokens = len(meta.seq_lens), len(out)
        if not num_tokens:
            return
        if not num_rows:
            out.zero_()
            return
        is_single = meta.is_single and num_rows == num_tokens
        block_t = _SINGLE_TOKENS if is_single else _TOKENS
        num_parts = triton.cdiv(channels, _CHANNELS)
        where = (meta.idx_mapping, meta.query_start_loc, meta.seq_lens)
        convolve[(triton.cdiv(num_tokens, block_t), num_parts)](
            x, states, weight, bias, out, *where, num_rows, num_tokens,
            num_bits(num_rows), meta.ring, channels, x.stride(0), out.stride(0),
            *states.stride()[:2],
            WIDTH=width, HAS_BIAS=bias is not None, IS_SINGLE=is_single,
            BLOCK_T=block_t, BLOCK_C=_CHANNELS,
        )  # fmt: skip
        if not is_single:
            move_states[(num_rows, num_parts)](
                x, states, *where, meta.ring, channels, x.stride(0), *states.stride()[:2],
                WIDTH=width, BLOCK_W=triton.next_power_of_2(width), BLOCK_C=_CHANNELS,
            )  # fmt: skip

    return kernel
