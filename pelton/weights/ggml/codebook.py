"""The IQ types: blocks of 256 numbers as points of a codebook times signs (or plus a shift) times
scales; and IQ4_XS, whose points are single values.

As in plain.py: uint8 [n, bytes] in, float32 [n, 256] filled, equal to ggml to the last bit. Source
of the layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

import functools

import torch

from pelton.weights.ggml.bits import fields, half, words
from pelton.weights.ggml.grids import codebook, even_sign_patterns, sign_patterns
from pelton.weights.ggml.plain import iq4_values, look_up


def _points(kind: str, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [n, 256] with the codebook's points; indices: int32 [n, points per block]."""
    grid = codebook(kind)
    torch.index_select(grid, 0, indices.reshape(-1), out=out.view(-1, grid.shape[1]))


def _signs(patterns: torch.Tensor, indices: torch.Tensor, out: torch.Tensor) -> None:
    """Give each run of 8 numbers of `out` [n, 256] its pattern; indices: int32 [n, 32]."""
    out.view(-1, 8).mul_(torch.index_select(patterns, 0, indices.reshape(-1)))


def _scale(scales: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply equal runs of `out` [n, 256] by scales, float32 [n, runs]."""
    out.view(*scales.shape, -1).mul_(scales.unsqueeze(-1))


@functools.cache
def _shifts(width: int) -> torch.Tensor:
    """int32 [4]: of four fields of `width` bits in a word."""
    return torch.arange(0, 4 * width, width, dtype=torch.int32)


def _four_fields(packed: torch.Tensor, width: int) -> torch.Tensor:
    """[n, words] -> int32 [n, words * 4], the lowest fields of `width` bits."""
    parts = packed.int().unsqueeze(-1) >> _shifts(width)
    return parts.bitwise_and_((1 << width) - 1).view(packed.shape[0], -1)


def iq2_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; eight times: four indices of 8 bits, four sign patterns of 7 bits, a scale of 4."""
    packed = blocks[:, 2:].reshape(-1, 8, 8)
    upper = words(packed[:, :, 4:].reshape(-1, 32), torch.int32)
    _points("IQ2_XXS", packed[:, :, :4].int(), out)
    _scale(half(blocks, 0) * ((upper >> 28 & 15).float() + 0.5) * 0.25, out)
    _signs(even_sign_patterns(), _four_fields(upper, 7), out)


def iq2_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; 32 indices of 9 bits with sign patterns of 7 bits; 16 scales of 4 bits."""
    packed = words(blocks[:, 2:66], torch.int16).int()
    _points("IQ2_XS", packed & 511, out)
    _scale(half(blocks, 0) * (fields(blocks[:, 66:], 4, 1).float() + 0.5) * 0.25, out)
    _signs(even_sign_patterns(), packed >> 9 & 127, out)


def iq2_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; 32 low bytes of indices; 32 sign patterns; 32 high fields of two bits of the indices;
    16 scales of 4 bits."""
    high = fields(blocks[:, 66:74], 2, 1).int()
    _points("IQ2_S", blocks[:, 2:34].int() | high << 8, out)
    _scale(half(blocks, 0) * (fields(blocks[:, 74:], 4, 1).float() + 0.5) * 0.25, out)
    _signs(sign_patterns(), blocks[:, 34:66].int(), out)


def iq3_xxs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; 64 indices; eight words of four sign patterns of 7 bits and a scale of 4 bits."""
    upper = words(blocks[:, 66:], torch.int32)
    _points("IQ3_XXS", blocks[:, 2:66].int(), out)
    _scale(half(blocks, 0) * ((upper >> 28 & 15).float() + 0.5) * 0.5, out)
    _signs(even_sign_patterns(), _four_fields(upper, 7), out)


def iq3_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; 64 low bytes of indices; 64 ninth bits of these; 32 sign patterns; 8 scales of 4
    bits."""
    high = fields(blocks[:, 66:74], 1, 1).int()
    _points("IQ3_S", blocks[:, 2:66].int() | high << 8, out)
    _scale(half(blocks, 0) * (fields(blocks[:, 106:], 4, 1) * 2 + 1), out)
    _signs(sign_patterns(), blocks[:, 74:106].int(), out)


def iq1_s(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; 32 low bytes of indices; eight words of four high fields of 3 bits, a scale of 3 bits
    and a bit that says whether 1/8 is subtracted or added: scale * (point +- 1/8)."""
    upper = words(blocks[:, 34:], torch.int16).int()
    _points("IQ1_S", blocks[:, 2:34].int() | _four_fields(upper, 3) << 8, out)
    shift = 0.125 - (upper >> 15 & 1).float() * 0.25
    out.view(-1, 8, 32).add_(shift.unsqueeze(-1))
    _scale(half(blocks, 0) * ((upper >> 12 & 7) * 2 + 1), out)


def iq1_m(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """32 low bytes of indices; 32 nibbles of a high field of 3 bits and the shift's sign; four
    words of four scales of 3 bits, whose highest nibbles are the float16 scale of these."""
    upper = fields(blocks[:, 32:48], 4, 1).int()
    packed = words(blocks[:, 48:], torch.int16)
    scale = torch.zeros_like(packed[:, :1])
    for place in range(4):
        scale |= (packed[:, place : place + 1] >> 12 & 15) << 4 * place
    _points("IQ1_S", blocks[:, :32].int() | (upper & 7) << 8, out)
    shift = 0.125 - (upper >> 3).float() * 0.25
    out.view(-1, 32, 8).add_(shift.unsqueeze(-1))
    _scale(scale.view(torch.float16).float() * (_four_fields(packed, 3) * 2 + 1), out)


def iq4_xs(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale; eight high fields of two bits and eight low nibbles of the scales; 256 nibbles:
    scale * (s - 32) * value[q]."""
    high, low = fields(blocks[:, 2:4], 2, 1), fields(blocks[:, 4:8], 4, 1)
    scales = low.bitwise_or_(high << 4).float().sub_(32).mul_(half(blocks, 0))
    look_up(iq4_values(), fields(blocks[:, 8:], 4, 16), out)
    _scale(scales, out)
