"""Make tokens that stand in the request already less likely, or more."""

from pelton.ops.step_kernels import step_kernel
from pelton.sampling.tile import Tile


def penalties(tile: Tile) -> None:
    """Counted anew in every step, from the row's token table: so there is no state that preemption,
    chunks, a slot's next owner or rejected drafts could leave wrong."""
    repetition, frequency, presence = tile.table(tile.rows.penalties).unbind(1)
    step_kernel("penalties", tile.scores.device.type)(
        tile.scores,
        tile.history(),
        tile.prompt_len(),
        tile.positions + 1,
        repetition,
        frequency,
        presence,
    )
