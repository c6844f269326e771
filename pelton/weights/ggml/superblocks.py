"""The K types: blocks of 256 numbers in runs of 16 or 32, each with its own small scale.

As in plain.py: uint8 [n, bytes] in, float32 [n, 256] filled, equal to ggml to the last bit. Source
of the layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

import torch

from pelton.weights.ggml.bits import fields, half


def q2_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """16 scales and minima (a nibble each), 256 fields of two bits, scale and minimum of these."""
    scales = (blocks[:, :16] & 15) * half(blocks, 80)
    minima = (blocks[:, :16] >> 4) * half(blocks, 82)
    out.copy_(fields(blocks[:, 16:80], 2, 32))
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1)).sub_(minima.unsqueeze(-1))


def q3_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """256 third bits, 256 fields of two bits, 16 scales of six bits, their scale.

    A cleared third bit means minus four.
    """
    low, high = fields(blocks[:, 96:104], 4, 8), fields(blocks[:, 104:108], 2, 4)
    scales = low.bitwise_or_(high << 4).float().sub_(32).mul_(half(blocks, 108))
    numbers = fields(blocks[:, 32:96], 2, 32).bitwise_or_(fields(blocks[:, :32], 1, 32) << 2)
    out.copy_(numbers).sub_(4)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K: float32 [n, 8, 1] each.

    Bytes 4..15 hold eight scales and eight minima of six bits: the first four of each are the low
    six bits of bytes 4..7 and 8..11; the last four have their low nibbles in bytes 12..15 and their
    high two bits in what is left of bytes 4..7 and 8..11.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=1)
    return (
        (scales * half(blocks, 0)).unsqueeze(-1),
        (minima * half(blocks, 2)).unsqueeze(-1),
    )


def q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Scale and minimum of the scales and minima, these, 256 nibbles."""
    scales, minima = _scales_and_minima(blocks)
    out.copy_(fields(blocks[:, 16:], 4, 32))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """As Q4_K, with 256 fifth bits before the nibbles."""
    scales, minima = _scales_and_minima(blocks)
    high = fields(blocks[:, 16:48], 1, 32)
    out.copy_(fields(blocks[:, 48:], 4, 32).bitwise_or_(high << 4))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """256 nibbles, 256 high fields of two bits, 16 int8 scales, their scale: scale * (q - 32)."""
    high = fields(blocks[:, 128:192], 2, 32)
    scales = blocks[:, 192:208].view(torch.int8) * half(blocks, 208)
    out.copy_(fields(blocks[:, :128], 4, 64).bitwise_or_(high << 4)).sub_(32)
    out.view(-1, 16, 16).mul_(scales.unsqueeze(-1))
