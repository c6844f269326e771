"""Blocks of any quantised type that can be read, as numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pelton.weights.ggml import codebook, plain, superblocks

_DEQUANTISE: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "Q4_0": plain.q4_0,
    "Q4_1": plain.q4_1,
    "Q5_0": plain.q5_0,
    "Q5_1": plain.q5_1,
    "Q8_0": plain.q8_0,
    "Q2_K": superblocks.q2_k,
    "Q3_K": superblocks.q3_k,
    "Q4_K": superblocks.q4_k,
    "Q5_K": superblocks.q5_k,
    "Q6_K": superblocks.q6_k,
    "IQ1_S": codebook.iq1_s,
    "IQ1_M": codebook.iq1_m,
    "IQ2_XXS": codebook.iq2_xxs,
    "IQ2_XS": codebook.iq2_xs,
    "IQ2_S": codebook.iq2_s,
    "IQ3_XXS": codebook.iq3_xxs,
    "IQ3_S": codebook.iq3_s,
    "IQ4_NL": plain.iq4_nl,
    "IQ4_XS": codebook.iq4_xs,
    "TQ1_0": plain.tq1_0,
    "TQ2_0": plain.tq2_0,
    "MXFP4": plain.mxfp4,
    "NVFP4": plain.nvfp4,
}
QUANTISED_TYPES = tuple(_DEQUANTISE)

# So many numbers at a time, so that the intermediate tensors stay in the CPU's cache.
_RUN = 256 * 1024


def dequantise(kind: str, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Turn whole blocks into numbers, bitwise those of ggml.

    kind: one of QUANTISED_TYPES. blocks: uint8 [n, block bytes], each block contiguous and at an
    even address. out: float32 [n, block size], contiguous.
    """
    step = max(_RUN // out.shape[1], 1)
    for start in range(0, len(blocks), step):
        _DEQUANTISE[kind](blocks[start : start + step], out[start : start + step])
