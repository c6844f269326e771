"""Add what logit_bias says."""

import torch

from pelton.ops.add_at import add_at
from pelton.sampling.row_lists import BIAS_IDS, BIAS_VALUES
from pelton.sampling.tile import Tile


def logit_bias(tile: Tile) -> None:
    width = tile.span.lists.bias_ids
    values = tile.words(BIAS_VALUES, width).view(torch.float32)
    add_at(tile.scores, tile.words(BIAS_IDS, width), values)
