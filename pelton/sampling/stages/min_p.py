"""Drop what is far less likely than the best token."""

from pelton.ops.step_kernels import step_kernel
from pelton.sampling.tile import Tile


def min_p(tile: Tile) -> None:
    kernel = step_kernel("min_p", tile.scores.device.type)
    kernel(tile.scores, tile.param(tile.rows.min_p))
