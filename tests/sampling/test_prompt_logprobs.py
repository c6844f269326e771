from __future__ import annotations

import pytest

from pelton.sampling.prompt_logprobs import Piece, tiles

PIECES = [Piece(3, 4, 7), Piece(4, 11, 2), Piece(20, 25, 0)]


@pytest.mark.parametrize("max_rows", [1, 2, 5, 7, 8, 12, 13, 14, 100])
def test_tiles_hold_every_token_once_and_in_order(max_rows):
    found = tiles(PIECES, max_rows)
    sizes = [sum(piece.last - piece.first for piece in tile) for tile in found]
    assert sizes == [max_rows] * (13 // max_rows) + ([13 % max_rows] if 13 % max_rows else [])
    tokens = [
        (token, piece.slot)
        for tile in found
        for piece in tile
        for token in range(piece.first, piece.last)
    ]
    assert tokens == [
        (token, piece.slot) for piece in PIECES for token in range(piece.first, piece.last)
    ]


def test_no_piece_no_tile():
    assert tiles([], 4) == []
