"""Order and limits of the stop checks."""

from __future__ import annotations

import pytest

from pelton.config.params import SamplingParams
from pelton.core.request import Request
from pelton.core.stopping import check_stop

EOS = 9


def stop_after(tokens, *, max_total_len=100, **params):
    request = Request("a", [1, 2, 3], SamplingParams(**params), eos_token_ids=(EOS,))
    request.max_total_len = max_total_len
    stop = None
    for token in tokens:
        assert stop is None
        request.append(token)
        stop = check_stop(request, token)
    return stop


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        ([5], {}, None),
        ([5, EOS], {}, ("stop", None)),
        ([5, EOS], {"ignore_eos": True}, None),
        ([5, 6], {"stop_token_ids": [6]}, ("stop", 6)),
        # End of sequence comes before a stop token, unless it is ignored.
        ([EOS], {"stop_token_ids": [EOS]}, ("stop", None)),
        ([EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, ("stop", EOS)),
        # Both come before length.
        ([5, EOS], {"max_total_len": 5}, ("stop", None)),
        ([5, 6], {"max_total_len": 5, "stop_token_ids": [6]}, ("stop", 6)),
        ([5, 5], {"max_total_len": 5}, ("length", None)),
        ([5], {"max_total_len": 5}, None),
        # Not before min_tokens; length does not ask.
        ([EOS, 5, EOS], {"min_tokens": 3}, ("stop", None)),
        ([6, 5], {"min_tokens": 3, "stop_token_ids": [6]}, None),
        ([EOS, EOS], {"min_tokens": 3, "max_total_len": 5}, ("length", None)),
    ],
)
def test_check_stop(tokens, options, expected):
    assert stop_after(tokens, **options) == expected
