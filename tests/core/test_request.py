"""What a request carries."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.config.params import SamplingParams
from pelton.core.request import Request


def test_token_ids_are_a_private_int32_copy():
    ids = np.array([1, 2, 3], dtype=np.int64)
    request = Request("a", ids, SamplingParams())
    ids[0] = 9
    assert request.token_ids.dtype == np.int32
    assert request.known_token_ids.tolist() == [1, 2, 3]


def test_arrays_given_out_keep_their_content_and_cannot_be_written():
    request = Request("a", [1, 2, 3], SamplingParams())
    before = request.known_token_ids
    for token in range(100):
        request.append(token)
    assert before.tolist() == [1, 2, 3]
    assert request.output_token_ids.tolist() == list(range(100))
    assert request.num_output_tokens == 100
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 5


def test_seeds():
    fixed = SamplingParams(seed=-5)
    assert Request("a", [1], fixed, seed=8).seed == -5
    assert Request("a", [1], SamplingParams(seed=0), seed=8).seed == 0
    assert Request("a", [1], SamplingParams(), seed=8).seed == 8
    drawn = [Request("a", [1], SamplingParams()).seed for _ in range(50)]
    assert len(set(drawn)) == 50
    assert all(-(2**63) <= seed < 2**63 for seed in drawn)
    assert min(drawn) < 0 < max(drawn)
