"""Quantised keys and values, read byte by byte."""

from __future__ import annotations

import numpy as np
import torch

CODES = {
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def code_values(codes: torch.dtype) -> np.ndarray:
    """[256] float64: what each byte stands for. NaN and infinities are NaN."""
    values = torch.arange(256, dtype=torch.uint8).view(codes).double().numpy()
    return np.where(np.isfinite(values), values, np.nan)


def decoded(
    rows: torch.Tensor, num_kv_heads: int, head_dim: int, codes: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Float64 numbers [T, 2, Hk, D] and scales [T, 2, Hk] of rows uint8 [T, 2 * Hk * (D + 2)]."""
    data = rows.numpy()
    num_codes = 2 * num_kv_heads * head_dim
    assert data.shape[1] == num_codes + 2 * num_kv_heads * 2
    numbers = code_values(codes)[data[:, :num_codes]].reshape(-1, 2, num_kv_heads, head_dim)
    # A bfloat16 is the upper half of a float32.
    upper = np.ascontiguousarray(data[:, num_codes:]).view("<u2").astype(np.uint32) << 16
    scale = upper.view(np.float32).astype(np.float64).reshape(-1, 2, num_kv_heads)
    with np.errstate(invalid="ignore"):
        return numbers * scale[..., None], scale
