from __future__ import annotations

import pytest

from pelton.config.names import known_names, near_name

FIELDS = ["stop", "stream", "temperature", "top_k", "top_p", "max_tokens", "model"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("temp", "temperature"),
        ("top", "top_p"),  # not "stop", which shares as many letters
        ("modle", "model"),
        ("guided_json", None),
        ("tools", None),
        ("to", None),
        ("", None),
    ],
)
def test_only_what_is_really_near_is_guessed(given: str, meant: str | None) -> None:
    assert near_name(given, FIELDS) == meant


def test_what_switches_off_is_not_taken_for_what_switches_on() -> None:
    flags = ["--log-requests", "--no-log-requests", "--log-prompts"]
    assert near_name("--disable-log-requests", flags) == "--no-log-requests"


def test_an_unknown_name_tells_all_known_ones() -> None:
    assert known_names("x", ["b", "a"]) == " Known: a, b."
    assert known_names("bfloat", ["bfloat16", "float16"]).startswith(" Did you mean 'bfloat16'?")
