"""MXFP4: 32 numbers of 4 bits share a power of two.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0).
"""

from __future__ import annotations

import functools
import math

import torch

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks: [..., n, BLOCK / 2] uint8, the earlier number in the low bits. scales: [..., n]
    uint8, exponents with a bias of 127, 255 = NaN.

    Returns [..., n * BLOCK] bfloat16; exact, but infinite where bfloat16 ends.
    """
    pairs, powers = _tables()
    flat = pairs.index_select(0, blocks.flatten().int()).view(torch.bfloat16)
    numbers = flat.view(*scales.shape, BLOCK)
    numbers *= powers[scales.int()][..., None]
    return numbers.flatten(-2)


@functools.cache
def _tables() -> tuple[torch.Tensor, torch.Tensor]:
    """The two numbers of each byte, bfloat16 side by side in an int32 [256]; the factor of each
    scale [256]."""
    codes = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([codes[byte & 15], codes[byte >> 4]], dim=1).view(torch.int32)[:, 0]
    powers = [math.ldexp(1.0, exponent - 127) for exponent in range(255)]
    return pairs.contiguous(), torch.tensor([*powers, math.nan]).bfloat16()
