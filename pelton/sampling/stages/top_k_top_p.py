"""Keep the most likely tokens: so many, or so much probability."""

import torch

from pelton.ops import top_k_top_p as op
from pelton.ops.step_kernels import step_kernel
from pelton.sampling.tile import Tile


def top_k_top_p(tile: Tile) -> None:
    """From here on only candidates are left. On a GPU that is so where they are few: to sort many
    would be a hundred launches or more."""
    top_k, top_p = tile.param(tile.rows.top_k), tile.param(tile.rows.top_p)
    shape = (len(tile.scores), tile.span.num_candidates)
    if tile.scores.is_cuda and shape[1] > op.MAX_CANDIDATES:
        step_kernel("keep_top", "cuda")(tile.scores, top_k, top_p)
        return
    values = tile.scores.new_empty(shape)
    token_ids = tile.scores.new_empty(shape, dtype=torch.int32)
    kernel = step_kernel("top_k_top_p", tile.scores.device.type)
    kernel(tile.scores, top_k, top_p, values, token_ids)
    tile.scores = values
    tile.token_ids = token_ids
