"""Flatten or sharpen the distribution."""

import torch

from pelton.sampling.tile import Tile


def temperature(tile: Tile) -> None:
    """scores / temperature; greedy rows (0) stay as they are."""
    value = tile.param(tile.rows.temperature)
    tile.scores.div_(torch.where(value > 0, value, 1.0)[:, None])
