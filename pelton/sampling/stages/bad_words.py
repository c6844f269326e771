"""Forbid the token that would complete a bad word."""

import torch

from pelton.ops.mask_bad_words import mask_bad_words
from pelton.sampling.row_lists import BAD_WORD_LEN, BAD_WORDS
from pelton.sampling.tile import Tile


def bad_words(tile: Tile) -> None:
    """A word counts where all of it is output: what the prompt says is the user's business."""
    num_words, word_len = tile.span.lists.bad_words, tile.span.lists.bad_word_len
    places = tile.table(tile.rows.lists.places)[:, :, None, None]
    own_len = places[:, BAD_WORD_LEN]
    arange = torch.arange(max(num_words, word_len), dtype=torch.int32, device=places.device)
    word, back = arange[:num_words, None], arange[None, :word_len]
    at = word * own_len + back
    is_token = (back < own_len) & (at < places[:, BAD_WORDS + 1])
    words = tile.pool[torch.where(is_token, places[:, BAD_WORDS] + at, 0).long()]

    index = tile.positions[:, None] - arange[None, : word_len - 1]
    is_output = index >= tile.prompt_len()[:, None]
    recent = torch.where(is_output, tile.tokens_at(index), -1)
    mask_bad_words(tile.scores, torch.where(is_token, words, -1), recent)
