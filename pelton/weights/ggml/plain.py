"""Types whose numbers are integers times a scale per block (Q4_0 to Q8_0), ternary (TQ) or one of
16 values (IQ4_NL, MXFP4, NVFP4).

Each function reads uint8 [n, bytes] of whole blocks and fills float32 [n, block size]. Source of
the layouts: ggml's ggml-common.h; the order of the operations is that of ggml's dequantize_row_*,
so that results are equal to the last bit.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from pelton.weights.ggml.bits import fields, half

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of FP4 (E2M1), because block scales are stored for these.
_FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale, 32 nibbles: scale * (q - 8)."""
    out.copy_(fields(blocks[:, 2:], 4, 16)).sub_(8).mul_(half(blocks, 0))


def q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale, minimum, 32 nibbles: scale * q + minimum."""
    out.copy_(fields(blocks[:, 4:], 4, 16)).mul_(half(blocks, 0)).add_(half(blocks, 2))


def q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale, 32 fifth bits, 32 nibbles: scale * (q - 16)."""
    out.copy_(_five_bits(blocks[:, 2:])).sub_(16).mul_(half(blocks, 0))


def q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale, minimum, 32 fifth bits, 32 nibbles: scale * q + minimum."""
    out.copy_(_five_bits(blocks[:, 4:])).mul_(half(blocks, 0)).add_(half(blocks, 2))


def _five_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 20] -> uint8 [n, 32]."""
    high = fields(packed[:, :4], 1, 1)
    return fields(packed[:, 4:], 4, 16).bitwise_or_(high << 4)


def q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale, 32 int8: q * scale."""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(half(blocks, 0))


def tq1_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Five ternary digits in a byte (four in each of the last four), scale: scale * (digit - 1).

    The byte is ceil(256 / 243 * number), so the highest digit is the byte times 3 over 256, and
    multiplying the byte by 3 modulo 256 brings the next one up.
    """
    parts = []
    for start, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        packed = blocks[:, start:end]
        for _ in range(digits):
            parts.append(packed)
            packed = packed * 3
    ternary = torch.cat(parts, dim=1).to(torch.int16).mul_(3).bitwise_right_shift_(8)
    out.copy_(ternary).sub_(1).mul_(half(blocks, 52))


def tq2_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """256 fields of two bits, scale: scale * (q - 1)."""
    out.copy_(fields(blocks[:, :64], 2, 32)).sub_(1).mul_(half(blocks, 64))


@functools.cache
def _table(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def look_up(values: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """out[i, j] = values[indices[i, j]]. values: float32 [k]; indices: uint8, of out's shape."""
    torch.index_select(values, 0, indices.view(-1).int(), out=out.view(-1))


def iq4_values() -> torch.Tensor:
    """float32 [16]: the values of IQ4_NL and IQ4_XS."""
    return _table(_IQ4_VALUES)


def iq4_nl(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale, 32 nibbles: scale * value[q]."""
    look_up(iq4_values(), fields(blocks[:, 2:], 4, 16), out)
    out.mul_(half(blocks, 0))


@functools.cache
def _half_powers_of_two() -> torch.Tensor:
    """float32 [256]: 2**(e - 128), which is half of what E8M0 means; the lowest are subnormal."""
    return torch.from_numpy(np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32))


def mxfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale (E8M0), 32 nibbles: scale / 2 * doubled FP4 value[q].

    Source: OCP Microscaling Formats (MX) Specification 1.0.
    """
    look_up(_table(_FP4_DOUBLED), fields(blocks[:, 1:], 4, 16), out)
    out.mul_(_half_powers_of_two()[blocks[:, :1].int()])


@functools.cache
def _half_ue4m3() -> torch.Tensor:
    """float32 [256]: half of what the low seven bits mean as E4M3 (bias 7). 0x7F, NaN, gives 0."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8 + mantissa, exponent - 11)
    )
    magnitude[0x7F] = 0
    return torch.from_numpy(magnitude.astype(np.float32))


def nvfp4(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Four scales (unsigned E4M3), four runs of 16 nibbles: scale / 2 * doubled FP4 value[q]."""
    look_up(_table(_FP4_DOUBLED), fields(blocks[:, 4:], 4, 8), out)
    out.view(-1, 4, 16).mul_(_half_ue4m3()[blocks[:, :4].int()].unsqueeze(-1))
