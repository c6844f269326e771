"""N-gram proposals against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.batch import BatchRig

from pelton.device.cpu import CPUDevice
from pelton.ops.ngram_propose import ngram_propose
from pelton.ops.step_tensors import TOTAL_LEN, RowTensors, StepArrays


def oracle(text: list[int], min_n: int, max_n: int, num_drafts: int) -> list[int]:
    """The longest n first, then the right-most place; what is drafted is text for the next one."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                known = text[end:]
                while len(known) < num_drafts:
                    known = known + text[end:]
                return known[:num_drafts]
    return [-1] * num_drafts


def rows_of(texts: list[list[int]], length: int) -> RowTensors:
    """One row of state per text, in order; what is behind a text's end is a lure."""
    rows = BatchRig(CPUDevice(1), max_num_seqs=len(texts), max_model_len=length).row_tensors
    rows.tokens.fill_(1)
    for slot, text in enumerate(texts):
        rows.fields[slot, TOTAL_LEN] = len(text)
        rows.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return rows


def propose(
    texts: list[list[int]],
    *,
    slots: list[int] | None = None,
    num_drafts: int = 4,
    min_n: int = 1,
    max_n: int = 3,
    width: int | None = None,
    length: int = 64,
) -> list[list[int]]:
    slots = slots or list(range(len(texts)))
    empty = torch.zeros(len(slots) + 1, dtype=torch.int32)
    step = StepArrays(
        live=torch.tensor([len(slots), 0, 0], dtype=torch.int32),
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=empty,
        cu_num_logits=empty,
    )
    drafts = torch.full((len(slots), num_drafts), -7, dtype=torch.int32)
    ngram_propose(rows_of(texts, length), step, drafts, min_n, max_n, width or length)
    return drafts.tolist()


def test_examples():
    text = [5, 6, 7, 8, 9, 5, 6]
    assert propose([text]) == [[7, 8, 9, 5]]
    assert propose([[5, 6, 7]]) == [[-1] * 4]  # nothing stands there twice
    assert propose([[5]]) == [[-1] * 4]
    assert propose([[5, 5]]) == [[5] * 4]
    # The longest ending wins over a later shorter one, and the later of two as long.
    assert propose([[1, 2, 3, 50, 3, 60, 1, 2, 3]])[0][0] == 50
    assert propose([[2, 3, 50, 2, 3, 60, 2, 3]])[0][0] == 60
    # Near the end the text goes on with its period.
    assert propose([[9, 4, 5, 4, 5]], num_drafts=5) == [[4, 5, 4, 5, 4]]


def test_placeholders_of_embeddings_are_like_nothing():
    """No two of them are equal, and what they stand for is drafted by nobody: see store_drafts."""
    text = [-1, 8, 9, -2, 8]
    assert propose([text], min_n=2) == [[-1] * 4]
    assert propose([text]) == [[9, -2, 8, 9]]


def test_lengths_of_the_ending():
    text = [1, 2, 3, 9, 8, 2, 3, 7, 3]
    assert propose([text], min_n=2) == [[-1] * 4]
    assert propose([text], min_n=1)[0][0] == 7
    text = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]
    assert propose([text], max_n=3)[0][0] == 50
    assert propose([text], max_n=2)[0][0] == 60
    # More than the text has.
    assert propose([text], min_n=1, max_n=40)[0][0] == 50
    assert propose([[3, 3]], min_n=2, max_n=9) == [[-1] * 4]


def test_rows_not_batch_order():
    texts = [[5, 6, 5], [7, 8, 7], [1, 2, 3]]
    assert propose(texts, slots=[2, 0, 1], num_drafts=2) == [[-1, -1], [6, 5], [8, 7]]


@pytest.mark.parametrize("alphabet", [2, 4, 30])
def test_random_texts(alphabet):
    rng = np.random.default_rng(alphabet)
    found = 0
    for case in range(60):
        texts = [
            rng.integers(1, 1 + alphabet, rng.integers(1, 41)).tolist()
            for _ in range(rng.integers(1, 6))
        ]
        min_n = int(rng.integers(1, 4))
        max_n = min_n + int(rng.integers(0, 4))
        num_drafts = int(rng.integers(1, 7))
        # As few columns as the longest text has, or more.
        width = max(map(len, texts)) + int(rng.integers(0, 5))
        got = propose(texts, num_drafts=num_drafts, min_n=min_n, max_n=max_n, width=width)
        expected = [oracle(text, min_n, max_n, num_drafts) for text in texts]
        assert got == expected, case
        found += sum(row[0] >= 0 for row in expected)
    assert found > 20


def test_a_full_token_table():
    text = [3, 4, 5] * 21 + [3]
    assert propose([text], num_drafts=3) == [[4, 5, 3]]
