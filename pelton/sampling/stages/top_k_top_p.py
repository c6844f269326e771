"""Keep the most likely tokens: so many, or so much probability."""

import torch

from pelton.ops import top_k_top_p as op
from pelton.sampling.tile import Tile


def top_k_top_p(tile: Tile) -> None:
    """From here on only candidates are left."""
    shape = (len(tile.scores), tile.span.num_candidates)
    values = tile.scores.new_empty(shape)
    token_ids = tile.scores.new_empty(shape, dtype=torch.int32)
    op.top_k_top_p(
        tile.scores, tile.param(tile.rows.top_k), tile.param(tile.rows.top_p), values, token_ids
    )
    tile.scores = values
    tile.token_ids = token_ids
