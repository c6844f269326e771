"""Rotary position tables."""

from __future__ import annotations

import math

import torch

from pelton.config.model import RopeConfig


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """[rotary_dim / 2] float32.

    Sources: arXiv 2104.09864; position interpolation ("linear"), arXiv 2306.15595; "llama3": the
    wavelength bands of Llama 3.1's published configuration; "yarn": arXiv 2309.00071, section 3.2;
    "longrope": arXiv 2402.13753.
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
    if config.kind == "yarn":
        return _yarn(config, config.theta**exponent)
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.short_factors) * config.theta**exponent)
    assert config.kind == "default", config.kind
    return frequencies


def _yarn(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """inverse: [rotary_dim / 2], of the frequencies. Those that turn more than beta_fast times over
    the original length stay, those below beta_slow turns are divided by the factor, and between
    the two there is a ramp."""

    def place(turns: float) -> float:
        """Index of the frequency that turns so often."""
        span = math.log(config.original_max_position / (turns * 2 * math.pi))
        return config.rotary_dim * span / (2 * math.log(config.theta))

    low, high = place(config.beta_fast), place(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(len(inverse), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * inverse) * (1 - kept) + 1.0 / inverse * kept


def rope_tables(
    config: RopeConfig, max_positions: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos [max_positions, rotary_dim] and sin [max_positions, rotary_dim / 2], times the attention
    factor, in `dtype`."""
    precise = torch.float64 if dtype == torch.float64 else torch.float32
    position = torch.arange(max_positions, dtype=precise)
    angle = torch.outer(position, inverse_frequencies(config).to(precise))
    cos = (angle.cos() * config.attention_factor).to(dtype)
    return torch.cat([cos, cos], dim=-1), (angle.sin() * config.attention_factor).to(dtype)
