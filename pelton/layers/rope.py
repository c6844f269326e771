"""Rotary position tables."""

from __future__ import annotations

import math

import torch

from pelton.config.model import RopeConfig


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] float32.

    Sources: arXiv 2104.09864; position interpolation ("linear"), arXiv 2306.15595; "llama3": the
    wavelength bands of Llama 3.1's published configuration.
    """
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    frequencies = 1.0 / (config.theta**exponent)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        old = config.original_max_position
        wavelength = 2 * math.pi / frequencies
        smooth = (old / wavelength - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        blended = (1 - smooth) * frequencies / config.factor + smooth * frequencies
        is_long = wavelength > old / config.low_freq_factor
        is_short = wavelength < old / config.high_freq_factor
        return torch.where(
            is_long, frequencies / config.factor, torch.where(is_short, frequencies, blended)
        )
    assert config.kind == "default", config.kind
    return frequencies


def rope_tables(
    config: RopeConfig, max_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos [max_positions, rotary_dim] and sin [max_positions, rotary_dim / 2], in `dtype`."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    position = torch.arange(max_positions, dtype=precise)
    angle = torch.outer(position, inverse_frequencies(config).to(precise))
    cos = angle.cos().to(dtype)
    return torch.cat([cos, cos], dim=-1), angle.sin().to(dtype)
