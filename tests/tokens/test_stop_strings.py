from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pelton.errors import RequestError
from pelton.tokens.stop_strings import StopMatcher

PIECES = ["A", "BC", "DEF", "G", "HI", "J", "K"]


def stream(
    pieces: list[str], stops: tuple[str, ...], include_stop: bool = False
) -> tuple[list[str], str | None]:
    """What a client sees: the deltas, and the stop string."""
    matcher = StopMatcher(stops, include_stop=include_stop)
    deltas = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        deltas.append(text)
        if matched is not None:
            return deltas, matched
    return [*deltas, matcher.finish()], None


def one_shot(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, str | None]:
    """The definition: smallest end, then smallest start."""
    found = [
        (start + len(stop), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include_stop else start], stop


@pytest.mark.parametrize(
    ("stops", "expected", "matched"),
    [
        (("DEFGHIJ",), ["A", "BC", "", "", "", ""], "DEFGHIJ"),
        (("GX", "DEFGQ"), ["A", "BC", "", "", "DEFGHI", "J", "K", ""], None),
        (("C",), ["A", "B"], "C"),
        (("\n\n",), ["A", "BC", "DEF", "G", "HI", "J", "K", ""], None),
        (("FG", "DEFG"), ["A", "BC", "", ""], "DEFG"),
        (("JK", "EF"), ["A", "BC", "D"], "EF"),
        (("K!",), ["A", "BC", "DEF", "G", "HI", "J", "", "K"], None),
    ],
)
def test_deltas(stops: tuple[str, ...], expected: list[str], matched: str | None) -> None:
    """Case 22: nothing of a stop string is shown; text that can not match goes out at once."""
    assert stream(PIECES, stops) == (expected, matched)


def test_included_stop_is_shown_and_nothing_after_it() -> None:
    """Case 22."""
    assert stream(PIECES, ("EFG",), include_stop=True) == (["A", "BC", "DEF", "G"], "EFG")
    assert stream(PIECES, ("HIJ", "H"), include_stop=True) == (["A", "BC", "DEF", "G", "H"], "H")


def test_line_breaks() -> None:
    """Case 22."""
    assert stream(["a\n", "b\n", "\nc"], ("\n\n",)) == (["a", "\nb", ""], "\n\n")


def test_holds_the_longest_beginning_only() -> None:
    """Not the maximum length: after "aab" with stop "aac" only nothing is held."""
    matcher = StopMatcher(("aac",))
    assert matcher.push("aaa") == ("a", None)
    assert matcher.push("b") == ("aab", None)
    assert matcher.push("aa") == ("", None)
    assert matcher.push("c") == ("", "aac")


def test_match_that_began_while_disabled_counts() -> None:
    matcher = StopMatcher(("xyz",))
    assert matcher.push("axy", enabled=False) == ("a", None)
    assert matcher.push("z!") == ("", "xyz")


def test_match_that_ended_while_disabled_does_not_count() -> None:
    matcher = StopMatcher(("xy",))
    assert matcher.push("axyb xy", enabled=False) == ("axyb xy", None)
    assert matcher.push("y") == ("y", None)
    assert matcher.push("zxy") == ("z", "xy")


def test_disabled_match_may_grow_into_a_longer_one() -> None:
    matcher = StopMatcher(("xy", "xyz"))
    assert matcher.push("axy", enabled=False) == ("a", None)
    assert matcher.push("z") == ("", "xyz")


letters = st.sampled_from("ab\n")
stop_lists = st.lists(st.text(letters, min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text(letters, max_size=4), max_size=12),
    stops=stop_lists,
    include_stop=st.booleans(),
)
@example(pieces=["aab", "ab"], stops=["aabb", "ba"], include_stop=False)
def test_stream_equals_one_shot(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    """Case 22: however the text is cut."""
    deltas, matched = stream(pieces, tuple(stops), include_stop)
    assert ("".join(deltas), matched) == one_shot("".join(pieces), tuple(stops), include_stop)


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.text(letters, max_size=4), max_size=10), stops=stop_lists)
def test_holds_no_more_than_needed(pieces: list[str], stops: list[str]) -> None:
    """Case 22: what is held is exactly the longest end that begins a stop string."""
    matcher = StopMatcher(tuple(stops))
    seen, shown = "", ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        seen, shown = seen + piece, shown + text
        if matched is not None:
            return
        held = max(
            (
                n
                for n in range(len(seen) + 1)
                for stop in stops
                if stop.startswith(seen[-n:] * (n > 0))
            ),
        )
        assert shown == seen[: len(seen) - held]


def test_too_long() -> None:
    with pytest.raises(RequestError, match="20000 characters together; at most 16384") as caught:
        StopMatcher(("a" * 10_000, "b" * 10_000))
    assert caught.value.field == "stop"
