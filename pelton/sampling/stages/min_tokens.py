"""No end token before min_tokens."""

from pelton.ops.mask_stop_ids import mask_stop_ids
from pelton.sampling.tile import Tile


def min_tokens(tile: Tile) -> None:
    """The token to be drawn gets index position + 1; it may end the request from min_len on."""
    is_active = tile.positions + 1 < tile.param(tile.rows.min_len)
    stop_ids = tile.rows.stop_ids.tensor[:, : tile.span.num_stop_ids]
    mask_stop_ids(tile.scores, stop_ids.index_select(0, tile.slots), is_active)
