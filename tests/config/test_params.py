"""What SamplingParams takes, and how it says no."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pelton.config.params import MAX_BAD_WORD_TOKENS, SamplingParams
from pelton.errors import RequestError

WRONG = [
    ({"presence_penalty": 2.1}, "[-2, 2]"),
    ({"presence_penalty": math.nan}, "finite"),
    ({"frequency_penalty": -2.01}, "[-2, 2]"),
    ({"frequency_penalty": True}, "number"),
    ({"repetition_penalty": 0}, "[1e-06, 1e+06]"),
    ({"repetition_penalty": -1.0}, "[1e-06, 1e+06]"),
    ({"repetition_penalty": math.inf}, "finite"),
    ({"logit_bias": [5]}, "dict"),
    ({"logit_bias": {"x": 1.0}}, "integer"),
    ({"logit_bias": {1.5: 1.0}}, "integer"),
    ({"logit_bias": {2**31: 1.0}}, str(2**31 - 1)),
    ({"logit_bias": {5: 100.5}}, "[-100, 100]"),
    ({"logit_bias": {5: -math.inf}}, "finite"),
    ({"logit_bias": {"5": 1.0, 5: 2.0}}, "twice"),
    ({"allowed_token_ids": []}, "at least 1"),
    ({"allowed_token_ids": 5}, "list"),
    ({"allowed_token_ids": ["5"]}, "integer"),
    ({"bad_words": [""]}, "''"),
    ({"bad_words": ["fine", " "]}, "' '"),
    ({"bad_words": "word"}, "list"),
    ({"bad_words": [5]}, "5"),
    ({"bad_words_token_ids": ((1,), ())}, "at least 1"),
    ({"bad_words_token_ids": ((1,),) * (MAX_BAD_WORD_TOKENS + 1)}, str(MAX_BAD_WORD_TOKENS)),
    ({"logits_processors": [lambda scores, row: None]}, "by name"),
    ({"logits_processors": lambda scores, row: None}, "register"),
    ({"logits_processors": "name"}, "list"),
    ({"logits_processors": {"name": 5}}, "keyword arguments"),
    ({"logits_processors": {"name": None}}, "keyword arguments"),
    ({"best_of": 2}, "best_of=2 is not supported"),
    ({"best_of": True}, "best_of=True is not supported"),
    ({"temperature": 100.5}, "[0, 100]"),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"n": 1025}, "n must be between 1 and 1024, got 1025."),
]


@pytest.mark.parametrize(("changes", "words"), WRONG)
def test_wrong_values_are_refused_by_name(changes, words):
    """Case 26: field, value, limit."""
    (field,) = changes
    with pytest.raises(RequestError) as caught:
        SamplingParams(**changes)
    assert caught.value.field == field.removesuffix("_token_ids").replace("allowed", field)
    assert words in str(caught.value)
    assert field.removesuffix("_token_ids") in str(caught.value)


def test_values_are_normalised_once():
    """So that `replace`, which validates again, changes nothing."""
    params = SamplingParams(
        logit_bias={"7": 1, 8: -2.5, "-1": 3},
        allowed_token_ids=[9, 3, 9],
        bad_words=["a", " b"],
        bad_words_token_ids=[[1, 2], [3]],
        logits_processors=["first", "second"],
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1e-6,
    )
    assert params.logit_bias == {7: 1.0, 8: -2.5, -1: 3.0}
    assert params.allowed_token_ids == (9, 3)
    assert params.bad_words == ("a", " b")
    assert params.bad_words_token_ids == ((1, 2), (3,))
    assert params.processors == {"first": {}, "second": {}}
    again = replace(params, max_tokens=3)
    assert replace(again, max_tokens=16) == params
    assert dict(params.token_id_fields()) == {
        "stop_token_ids": (),
        "logit_bias": (7, 8, -1),
        "allowed_token_ids": (9, 3),
        "bad_words": (1, 2, 3),
    }


def test_a_users_dict_is_copied():
    biases, arguments = {5: 1.0}, {"name": {"x": 1}}
    params = SamplingParams(logit_bias=biases, logits_processors=arguments)
    biases[6] = 2.0
    arguments["name"]["x"] = 2
    assert params.logit_bias == {5: 1.0}
    assert params.processors == {"name": {"x": 1}}


def test_penalties_are_asked_for_or_not():
    assert not SamplingParams().has_penalties
    for name, value in (
        ("repetition_penalty", 1.1),
        ("presence_penalty", -0.1),
        ("frequency_penalty", 0.1),
    ):
        assert SamplingParams(**{name: value}).has_penalties
