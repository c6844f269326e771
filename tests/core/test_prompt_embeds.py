from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pelton.core.prompt_embeds import PromptEmbeds, end_of_rows, placeholders, rows_among


def test_the_example_of_the_docstring():
    is_row = np.array([False, True, True, False, True, False])
    ids = np.where(is_row, placeholders(is_row), [17, 0, 0, 8, 0, 9])
    assert ids.tolist() == [17, -1, -2, 8, -3, 9]
    assert end_of_rows(ids) == 5
    assert end_of_rows(ids[:1]) == 0


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_any_part_of_any_mix_knows_its_rows(mask, start, length):
    is_row = np.array(mask, np.bool_)
    ids = np.where(is_row, placeholders(is_row), 5).astype(np.int32)
    part = ids[start : start + length]
    first, count = rows_among(part)
    own = np.flatnonzero(is_row[start : start + length])
    assert count == len(own)
    if count:
        assert first == is_row[:start].sum()
    assert end_of_rows(ids) == (np.flatnonzero(is_row)[-1] + 1 if is_row.any() else 0)


def test_digests():
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    embeds = PromptEmbeds(rows, "float32")
    assert embeds.digest(np.array([7, -2, 8, -3], np.int32)) == b"".join(
        hashlib.sha256(row.tobytes()).digest() for row in rows[1:3]
    )
    assert embeds.digest(np.array([7, 8], np.int32)) == b""


@pytest.mark.parametrize("rows", [np.zeros((2, 3), np.float64), np.zeros(3, np.float32)])
def test_rows_are_as_the_dtype_says(rows):
    with pytest.raises(AssertionError):
        PromptEmbeds(rows, "float32")


def test_rows_become_contiguous():
    embeds = PromptEmbeds(np.arange(12, dtype=np.float32).reshape(3, 4).T, "float32")
    assert embeds.rows.flags.c_contiguous
    assert len(embeds) == 4
    assert embeds.width == 3
