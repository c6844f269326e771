from __future__ import annotations

import numpy as np
import pytest

from pelton.core.plan import LogprobRows
from pelton.sampling.logprobs import Logprob, token_logprobs

ROWS = LogprobRows(
    offsets=np.array([0, 1, 3], np.int32),
    token_logprobs=np.array([-0.5, -1.0, -9.0], np.float32),
    ranks=np.array([1, 2, 700], np.int32),
    top_ids=np.array([[4, 5, 6], [8, 7, 9], [1, 2, 3]], np.int32),
    top_logprobs=np.array([[-0.5, -1, -2], [-0.5, -1, -1], [-1, -1, -3]], np.float32),
)


def decode(token_id: int) -> str:
    return f"<{token_id}>"


@pytest.mark.parametrize("wanted", [0, 1, 3])
def test_distinct_sorted_and_exactly_n(wanted):
    """Case 17: the sampled token inside the top and outside it; 0 gives an empty list."""
    inside, outside = token_logprobs(ROWS, 1, [7, 50], wanted, decode)
    assert [token for token, _ in inside.top] == [8, 7, 9][:wanted]
    assert [token for token, _ in outside.top] == [1, 2, 3][:wanted]
    assert inside.logprob == Logprob(-1.0, 2, "<7>")
    assert outside.logprob == Logprob(-9.0, 700, "<50>")
    assert list(inside.as_dict()) == {0: [7], 1: [7, 8], 3: [7, 8, 9]}[wanted]
    assert list(outside.as_dict()) == [50, 1, 2, 3][: wanted + 1]


def test_equals_share_a_rank():
    inside, outside = token_logprobs(ROWS, 1, [7, 50], 3, decode)
    assert [entry.rank for _, entry in inside.top] == [1, 2, 2]
    assert [entry.rank for _, entry in outside.top] == [1, 1, 3]


def test_fewer_tokens_than_verification_rows():
    (only,) = token_logprobs(ROWS, 1, [7], 1, lambda token: None)
    assert only.logprob.decoded_token is None
    assert only.token_id == 7
