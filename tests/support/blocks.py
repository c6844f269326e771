"""Random weights in quantised blocks, and what they stand for."""

from __future__ import annotations

import gguf
import numpy as np
import torch

# Bytes of a block that hold a float16: scales first, then minima.
_HALVES = {"Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q6_K": (208,)}


def columns_of(form: str) -> int:
    """Of a block."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]][0]


def random_blocks(
    form: str, num_rows: int, num_columns: int, *, seed: int = 0, size: float = 0.05
) -> torch.Tensor:
    """uint8 [num_rows, bytes], every bit of every code random; scales of about `size` over the
    largest code."""
    generator = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[form]
    columns, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (num_rows, num_columns // columns, num_bytes), np.uint8)
    # Superblocks have small scales of six or eight bits below theirs.
    largest = {"Q8_0": 127, "Q6_K": 32 * 127, "Q4_K": 15 * 63, "Q5_K": 31 * 63}.get(form, 16)
    for start in _HALVES.get(form, (0, 2)):
        scales = generator.standard_normal(blocks.shape[:2]) * size / largest
        halves = scales.astype(np.float16)[..., None].view(np.uint8)
        blocks[..., start : start + 2] = halves
    return torch.from_numpy(blocks.reshape(num_rows, -1))


def numbers(form: str, blocks: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns], as the gguf library reads them."""
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[form]))
