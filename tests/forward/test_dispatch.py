"""Which recorded shape a step runs as."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pelton.config.graphs import GraphsConfig
from pelton.core.descriptor import Descriptor
from pelton.forward.dispatch import Ladder


def live(query_lens: list[int], max_seq_len: int = 30) -> Descriptor:
    longest = max(query_lens)
    return Descriptor(
        num_tokens=sum(query_lens),
        num_rows=len(query_lens),
        uniform_query_len=longest if longest == min(query_lens) else 0,
        max_query_len=longest,
        max_seq_len=max_seq_len,
    )


def ladder(**changes: Any) -> Ladder:
    known: dict[str, Any] = {
        "graphs": GraphsConfig(decode_sizes=(1, 2, 4, 8, 16, 20), token_sizes=(16, 64)),
        "query_lens": (1, 4),
        "max_rows": 20,
        "max_tokens": 70,
        "max_seq_len": 99,
    }
    return Ladder(**{**known, **changes})


def test_sizes():
    found = ladder().choose(live([1] * 5))
    assert found is not None
    assert (found.num_rows, found.num_tokens, found.uniform_query_len) == (8, 8, 1)
    assert (found.mode, found.max_seq_len, found.max_query_len) == ("full", 99, 1)
    found = ladder().choose(live([4] * 9))
    assert found is not None
    assert (found.num_rows, found.num_tokens) == (16, 64)
    # Drafts of some rows only, and a uniform prefill.
    for lens in ([1, 4, 4], [5, 5]):
        found = ladder().choose(live(lens))
        assert found is not None
        assert (found.num_rows, found.num_tokens, found.uniform_query_len) == (8, 16, 0)
        assert found.max_query_len == 16
    found = ladder().choose(live([1] * 9 + [30]))
    assert found is not None
    assert (found.num_rows, found.num_tokens) == (20, 64)
    assert ladder().choose(live([65])) is None
    found = ladder().choose(live([1] * 8 + [2]))
    assert found is not None
    assert (found.num_rows, found.num_tokens) == (16, 16), "no more rows than tokens"


def test_a_class_has_a_ladder_of_its_own():
    """16 rows of 4 tokens are 64 tokens; 20 rows would be 80, more than a step has, and run as a
    mixed step only if they fit one."""
    found = ladder().choose(live([4] * 17))
    assert found is None
    graphs = GraphsConfig(decode_sizes=(1, 2), token_sizes=(16,))
    found = ladder(graphs=graphs).choose(live([1] * 3))
    assert found is not None
    assert (found.num_tokens, found.num_rows, found.uniform_query_len) == (16, 8, 0)


def test_every_size_pads_nothing():
    every = ladder(graphs=GraphsConfig(every_decode_size=True))
    for rows in range(1, 18):
        found = every.choose(live([4] * rows))
        assert found is not None
        assert (found.num_rows, found.num_tokens) == (rows, 4 * rows)
    assert every.choose(live([3, 4])) is None
    assert list(every.shapes()) == []


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=20).filter(lambda lens: sum(lens) <= 70),
    st.booleans(),
)
def test_what_is_chosen_holds_the_step_and_is_listed(lens, every):
    known = ladder(
        graphs=GraphsConfig(decode_sizes=(1, 2, 4, 20), token_sizes=(16, 64)),
    )
    shape = live(lens)
    found = known.choose(shape)
    if found is None:
        assert sum(lens) > 64 or len(lens) * 4 > 70
        return
    assert found in set(known.shapes())
    assert found.num_rows >= shape.num_rows
    assert found.num_tokens >= shape.num_tokens
    assert found.max_query_len >= shape.max_query_len
    assert found.uniform_query_len in (0, shape.uniform_query_len)
    # No smaller one of its class would do.
    for other in known.shapes():
        if other.uniform_query_len == found.uniform_query_len and other != found:
            smaller = other.num_rows <= found.num_rows and other.num_tokens <= found.num_tokens
            fits = other.num_rows >= len(lens) and other.num_tokens >= sum(lens)
            assert not (smaller and fits)
