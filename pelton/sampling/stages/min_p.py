"""Drop what is far less likely than the best token."""

from pelton.ops import min_p as op
from pelton.sampling.tile import Tile


def min_p(tile: Tile) -> None:
    op.min_p(tile.scores, tile.param(tile.rows.min_p))
