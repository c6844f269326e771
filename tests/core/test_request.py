"""What a request carries."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.config.params import SamplingParams
from pelton.core.request import Request, check_request
from pelton.errors import RequestError


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


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids", "min_tokens=1"),
        ({"allowed_token_ids": [2, 7], "stop_token_ids": [7], "min_tokens": 3}, None, ""),
        ({"allowed_token_ids": [5], "bad_words_token_ids": ((5,),)}, None, "and bad_words"),
        ({"bad_words_token_ids": ((0,), (1,), (3,)), "min_tokens": 1}, "bad_words", "every token"),
    ],
)
def test_fields_that_leave_no_first_token_are_refused(options, field, words):
    """Case 20: told before it runs, by name; 2 is the end token of a vocabulary of 4 or 10."""
    vocab_size = 4 if "allowed_token_ids" not in options else 10
    params = SamplingParams(**options)
    request = Request("a", [1], params, eos_token_ids=(2,))
    with pytest.raises(RequestError, match="rule out every token for the first place") as refusal:
        check_request(request, max_model_len=8, vocab_size=vocab_size)
    assert refusal.value.field == (field or "allowed_token_ids")
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [2]},
        {"allowed_token_ids": [2, 3], "min_tokens": 1},
        {"allowed_token_ids": [2], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [5], "bad_words_token_ids": ((5, 5),)},
        {"bad_words_token_ids": ((0,), (1,)), "min_tokens": 1},
    ],
)
def test_fields_that_leave_a_first_token_are_taken(options):
    params = SamplingParams(**options)
    request = Request("a", [1], params, eos_token_ids=(2,))
    check_request(request, max_model_len=8, vocab_size=10)
