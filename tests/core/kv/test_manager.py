"""Block tables of one or two groups."""

from __future__ import annotations

import numpy as np
import pytest

from pelton.config.params import SamplingParams
from pelton.core.kv.manager import KVManager
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import SlotRef
from pelton.core.prompt_embeds import PromptEmbeds
from pelton.core.request import Request
from pelton.errors import IntegrityError, UnsupportedError


def manager(num_blocks=16, sizes=(4,), caching=True, windows=None):
    groups = [
        KVGroup(
            index=i,
            layers=(i,),
            block_size=size,
            kind="full" if window is None else "window",
            window=window,
        )
        for i, (size, window) in enumerate(zip(sizes, windows or [None] * len(sizes)))
    ]
    return KVManager(groups, num_blocks, enable_prefix_caching=caching)


def request(ids, **options):
    made = Request("r", ids, SamplingParams(), **options)
    made.ref = SlotRef(0, 1)
    return made


def compute(kv, made):
    """As if all known tokens' KV had been computed."""
    made.num_confirmed_tokens = made.num_tokens
    kv.settle(made, made.num_tokens)


def table(made, group=0):
    return [block.block_id for block in made.blocks[group]]


def test_the_worked_example():
    """specs/core.md 3.3b."""
    kv = manager()
    first = request(range(10))
    assert kv.admit(first)
    assert table(first) == [1, 2, 3]
    compute(kv, first)
    second = request(range(8))
    assert kv.admit(second)
    assert second.num_computed_tokens == 4
    assert table(second) == [1, 4]
    compute(kv, second)
    kv.check([first, second])
    key = first.blocks[0][1].key
    assert second.blocks[0][1].key == key
    assert [block.block_id for block in kv._cache.get_all(key)] == [2, 4]
    for token in range(10, 13):
        first.append(token)
    (append,) = kv.grow(first, 13)
    assert (append.group, append.first, append.block_ids.tolist()) == (0, 3, [5])
    first.num_confirmed_tokens = 12
    kv.settle(first, 12)
    kv.check([first, second])
    kv.release(first)
    free = [block.block_id for block in kv._pool.free_blocks()]
    assert free[0] == 5
    assert free[-2:] == [3, 2]
    kv.release(second)
    assert [block.block_id for block in kv._pool.free_blocks()][-4:] == [3, 2, 4, 1]


def test_growth_that_does_not_fit_changes_nothing():
    kv = manager(num_blocks=6, sizes=(4, 2))
    made = request(range(4))
    assert kv.admit(made)
    assert [len(blocks) for blocks in made.blocks] == [1, 2]
    assert kv.grow(made, 4) == []
    assert kv.grow(made, 7) is None
    assert [len(blocks) for blocks in made.blocks] == [1, 2]
    assert [a.group for a in kv.grow(made, 6)] == [0, 1]
    assert made.block_capacity == 6
    kv.check([made])


def test_admission_counts_idle_hits_as_needed():
    """A hit that is free leaves the free list: it cannot be counted as free for the rest."""
    kv = manager(num_blocks=5)
    first = request(range(8))
    assert kv.admit(first)
    compute(kv, first)
    kv.release(first)
    long = request(range(17))
    assert not kv.admit(long)
    assert long.blocks == []
    assert kv.num_used == 0
    fits = request([*range(8), *range(30, 38)])
    assert kv.admit(fits)
    assert fits.num_computed_tokens == 8
    assert kv.num_used == 4
    fits.num_confirmed_tokens = 8
    kv.check([fits])


def test_hits_of_two_block_sizes_are_a_multiple_of_both():
    kv = manager(num_blocks=64, sizes=(2, 3))
    first = request(range(11))
    assert kv.admit(first)
    compute(kv, first)
    second = request(range(11))
    assert kv.admit(second)
    assert second.num_computed_tokens == 6
    assert table(second, 0)[:3] == table(first, 0)[:3]
    assert table(second, 1)[:2] == table(first, 1)[:2]
    assert table(second, 1)[2] != table(first, 1)[2]


@pytest.mark.parametrize(
    ("one", "two", "hits"),
    [
        ({}, {}, 8),
        ({"cache_salt": "a"}, {}, 0),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {"adapter": "a"}, 0),
        ({"adapter": "a"}, {"adapter": "a"}, 8),
    ],
)
def test_extra_keys(one, two, hits):
    kv = manager()
    first = request(range(9), **one)
    assert kv.admit(first)
    compute(kv, first)
    second = request(range(9), **two)
    assert kv.admit(second)
    assert second.num_computed_tokens == hits


def embeds(*values):
    """One row for each value."""
    return PromptEmbeds(np.repeat(np.array(values, np.float32)[:, None], 3, 1), "float32")


TEXT = (list(range(9)), None)
ROWS = (list(range(-1, -10, -1)), embeds(*range(9)))
MIX = ([-1, -2, 2, 3, 4, 5, -3, 7, 8], embeds(0, 1, 6))


@pytest.mark.parametrize(
    ("one", "two", "hits"),
    [
        (ROWS, ROWS, 8),
        (MIX, MIX, 8),
        (ROWS, TEXT, 0),
        (TEXT, ROWS, 0),
        # What is behind a block does not count: equal prefixes are shared.
        (ROWS, ([*range(-1, -6, -1), 5, 6, 7, 8], embeds(0, 1, 2, 3, 99)), 4),
        (MIX, (MIX[0], embeds(0, 1, 99)), 4),
        (MIX, (MIX[0], embeds(0, 99, 6)), 0),
        # Two masks over equal rows and equal ids.
        (MIX, ([-1, 1, -2, 3, 4, 5, -3, 7, 8], embeds(0, 1, 6)), 0),
        (MIX, ([-1, -2, 2, 3, -3, 5, 6, 7, 8], embeds(0, 1, 6)), 4),
        (([0, *MIX[0]], MIX[1]), MIX, 0),
    ],
)
def test_embeddings_and_where_they_stand(one, two, hits):
    kv = manager()
    first = request(one[0], prompt_embeds=one[1])
    assert kv.admit(first)
    compute(kv, first)
    second = request(two[0], prompt_embeds=two[1])
    assert kv.admit(second)
    assert second.num_computed_tokens == hits


def test_eviction_forgets_the_block():
    kv = manager(num_blocks=4)
    first = request(range(9))
    assert kv.admit(first)
    compute(kv, first)
    kv.release(first)
    other = request(range(20, 28))
    assert kv.admit(other)  # takes the unhashed block and the tail of the two cached ones
    again = request(range(5))
    assert kv.admit(again) is None
    kv.release(other)
    assert kv.admit(again)
    assert again.num_computed_tokens == 4
    again.num_confirmed_tokens = 4
    kv.check([again])


def test_distrusted_blocks_are_forgotten_unless_in_use():
    """Case 19: also the blocks of an earlier life; not those of a living neighbour."""
    kv = manager()
    shared, bad = request(range(4)), request(range(13))
    assert kv.admit(shared)
    compute(kv, shared)
    assert kv.admit(bad)
    compute(kv, bad)
    kv.release_distrusted(bad)
    kv.check([shared])
    probe = request(range(13))
    assert kv.admit(probe)
    assert probe.num_computed_tokens == 4
    assert [block.block_id for block in kv._pool.free_blocks()][-1] == 15


@pytest.mark.parametrize(("sizes", "expected"), [((4,), 60), ((2, 4), 20), ((3, 2), 18)])
def test_max_tokens(sizes, expected):
    kv = manager(sizes=sizes)
    assert kv.max_tokens() == expected
    assert kv.num_blocks_for(expected) <= 15 < kv.num_blocks_for(expected + 1)


def test_refusals():
    cross = KVGroup(index=0, layers=(0,), block_size=4, kind="cross")
    with pytest.raises(UnsupportedError, match="cross"):
        KVManager([cross], 16, enable_prefix_caching=True)


def test_without_groups_nobody_waits_for_a_block():
    kv = KVManager([], 2, enable_prefix_caching=False)
    made = request([5] * 1000)
    assert kv.num_blocks_for(1000) == 0
    assert kv.max_tokens() > 2**31
    admission = kv.admit(made)
    assert admission is not None
    assert (admission.num_hits, made.blocks, made.block_capacity > 2**31) == (0, [], True)
    kv.settle(made, 1000)
    kv.check([made])
    kv.release(made)
    kv.check([])
    assert kv.num_used == 0


def advance(kv, made, num_tokens):
    """As if steps had computed up to num_tokens of the known tokens."""
    made.num_confirmed_tokens = num_tokens
    if num_tokens >= made.next_settle_length:
        kv.settle(made, num_tokens)
    kv.check([made])


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 6, 9])
def test_a_window_gives_back_what_no_later_token_sees(window, caching):
    kv = manager(num_blocks=20, windows=(window,), caching=caching)
    made = request(range(40))
    assert kv.admit(made)
    assert kv.num_used == 10
    for computed in range(1, 41):
        advance(kv, made, computed)
        first_seen = max(computed - window + 1, 0)
        expected = [0] * (first_seen // 4) + list(range(1, 11))[first_seen // 4 :]
        assert table(made) == expected
        assert kv.num_used == 10 - first_seen // 4
    assert made.block_capacity == 40
    kv.release(made)
    kv.check([])
    assert kv.num_used == 0


def admitted_again(kv, num_tokens, num_hits):
    """A request for tokens that another one has computed, let in with so many of them."""
    first = request(range(num_tokens))
    assert kv.admit(first)
    compute(kv, first)
    kv.release(first)
    again = request(range(num_tokens))
    assert kv.admit(again)
    assert again.num_computed_tokens == num_hits
    return again


def test_a_window_hit_needs_the_run_before_its_end_only():
    """Window 7 of blocks of 4: the next token sees 6 before, so two blocks."""
    kv = manager(num_blocks=30, windows=(7,))
    again = admitted_again(kv, 21, 20)
    assert table(again)[:5] == [0, 0, 0, 4, 5]
    again.num_confirmed_tokens = 20
    kv.check([again])
    kv.release(again)
    kv._cache.remove(kv._pool.blocks[4])  # leaves runs 1-3 and 5
    third = request(range(21))
    assert kv.admit(third)
    assert third.num_computed_tokens == 12
    assert table(third)[:3] == [0, 2, 3]
    kv.release(third)
    kv._cache.remove(kv._pool.blocks[2])  # leaves runs 1 and 3: only the start needs no run before
    assert kv.admit(third)
    assert third.num_computed_tokens == 4


def forget(kv, group, ids):
    """Evict blocks of a group by the tokens' hash."""
    probe = request(ids)
    kv._extend_hashes(probe, len(ids))
    for block in kv._cache.get_all((group, probe.block_hashes[group][-1])):
        kv._cache.remove(block)


def test_groups_agree_on_the_longest_prefix_that_all_have():
    """Full attention has 0-7 and no more; the windows' runs end at 20, 12 and 8, of 4 and 2."""
    sizes, windows = (4, 4, 2), (None, 5, 3)
    kv = manager(num_blocks=90, sizes=sizes, windows=windows)
    again = admitted_again(kv, 21, 20)
    again.num_confirmed_tokens = 20
    kv.check([again])
    kv.release(again)
    forget(kv, 0, range(16))
    assert kv.admit(again)
    assert again.num_computed_tokens == 12
    assert [len([b for b in blocks if b.block_id == 0]) for blocks in again.blocks] == [0, 2, 5]
    kv.release(again)
    forget(kv, 1, range(12))
    assert kv.admit(again)
    assert again.num_computed_tokens == 8
    kv.release(again)
    forget(kv, 2, range(8))  # then only the odd block end 6 would do, and 4
    assert kv.admit(again)
    assert again.num_computed_tokens == 4
    again.num_confirmed_tokens = 4
    kv.check([again])
    assert kv.group_matches == [20 + 12 + 12 + 12, 4 * 20, 4 * 20]


def test_null_blocks_are_no_idle_hits():
    """They count for nothing when free blocks are compared with what is needed."""
    kv = manager(num_blocks=7, windows=(3,))
    again = admitted_again(kv, 20, 16)
    assert kv.num_used == 2
    again.num_confirmed_tokens = 16
    kv.check([again])


@pytest.mark.parametrize("damage", ["keep", "give back too much", "two groups"])
def test_the_check_sees_wrong_windows(damage):
    kv = manager(num_blocks=30, sizes=(4, 4), windows=(5, None))
    made = request(range(16))
    assert kv.admit(made)
    advance(kv, made, 10)
    if damage == "keep":
        made.num_confirmed_tokens = 12
    elif damage == "give back too much":
        kv._pool.release([made.blocks[0][1]])
        made.blocks[0][1] = kv._pool.null
    else:
        made.blocks[0][3], made.blocks[1][3] = made.blocks[1][3], made.blocks[1][3]
    with pytest.raises(IntegrityError):
        kv.check([made])
