from __future__ import annotations

import torch

from pelton.ops.mask_bad_words import mask_bad_words


def test_masks_what_would_complete_a_word():
    """Words from last token to first. Row 0 has put out ..., 5, 4; row 1 only 4; row 2 nothing."""
    words = [
        [3, 4, 5],  # complete in row 0
        [2, 4, -1],  # complete in rows 0 and 1
        [1, -1, -1],  # always
        [6, 5, 4],  # the other way round
        [-1, -1, -1],  # no word
        [99, 4, -1],  # outside the vocabulary
    ]
    recent = torch.tensor([[4, 5], [4, -1], [-1, -1]]).int()
    logits = torch.zeros(3, 8)
    mask_bad_words(logits, torch.tensor([words] * 3).int(), recent)
    masked = [row.isinf().nonzero()[:, 0].tolist() for row in logits]
    assert masked == [[1, 2, 3], [1, 2], [1]]


def test_words_of_one_token_need_no_past():
    logits = torch.zeros(2, 8)
    words = torch.tensor([[[7], [0]], [[-1], [3]]]).int()
    mask_bad_words(logits, words, torch.zeros(2, 0).int())
    assert [row.isinf().nonzero()[:, 0].tolist() for row in logits] == [[0, 7], [3]]
