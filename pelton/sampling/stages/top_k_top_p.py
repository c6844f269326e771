"""Keep the most likely tokens: so many, or so much probability."""

import torch

from pelton.ops import top_k_top_p as op
from pelton.ops.step_kernels import step_kernel
from pelton.sampling.tile import Tile

_SORTED = 1 << 20
"""Candidates of all rows together up to which a GPU sorts them."""


def top_k_top_p(tile: Tile) -> None:
    """From here on only candidates are left, where they are few or sorting costs little."""
    top_k, top_p = tile.param(tile.rows.top_k), tile.param(tile.rows.top_p)
    shape = (len(tile.scores), tile.span.num_candidates)
    kernel = op.top_k_top_p
    if tile.scores.is_cuda:
        if shape[1] <= op.MAX_CANDIDATES:
            kernel = step_kernel("top_k_top_p", "cuda")
        elif shape[0] * shape[1] > _SORTED:
            step_kernel("keep_top", "cuda")(tile.scores, top_k, top_p)
            return
    values = tile.scores.new_empty(shape)
    token_ids = tile.scores.new_empty(shape, dtype=torch.int32)
    kernel(tile.scores, top_k, top_p, values, token_ids)
    tile.scores = values
    tile.token_ids = token_ids
