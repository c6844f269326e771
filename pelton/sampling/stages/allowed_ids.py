"""Only the tokens of allowed_token_ids."""

from pelton.ops.keep_only import keep_only
from pelton.sampling.row_lists import ALLOWED_IDS
from pelton.sampling.tile import Tile


def allowed_ids(tile: Tile) -> None:
    keep_only(tile.scores, tile.words(ALLOWED_IDS, tile.span.lists.allowed_ids))
