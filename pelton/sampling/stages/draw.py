"""Choose one token."""

from pelton.ops.step_kernels import step_kernel
from pelton.sampling.rows import Need
from pelton.sampling.tile import Tile


def draw(tile: Tile) -> None:
    """Greedy rows beside random ones get no noise, which is the same as an argmax."""
    if not tile.span.needs & Need.RANDOM:
        step_kernel("argmax", tile.scores.device.type)(tile.scores, tile.out_ids, tile.out_max)
        return
    step_kernel("gumbel_argmax", tile.scores.device.type)(
        tile.scores,
        tile.token_ids,
        tile.param(tile.rows.temperature),
        tile.param(tile.rows.seed),
        tile.positions + 1,
        tile.out_ids,
        tile.out_max,
    )
