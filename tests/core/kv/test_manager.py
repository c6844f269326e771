"""Block tables of one or two groups."""

from __future__ import annotations

import pytest

from pelton.config.params import SamplingParams
from pelton.core.kv.manager import KVManager
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import SlotRef
from pelton.core.request import Request
from pelton.errors import ConfigError, UnsupportedError


def manager(num_blocks=16, sizes=(4,), caching=True):
    groups = [KVGroup(index=i, layers=(i,), block_size=size) for i, size in enumerate(sizes)]
    return KVManager(groups, num_blocks, enable_prefix_caching=caching)


def request(ids, **options):
    made = Request("r", ids, SamplingParams(), **options)
    made.ref = SlotRef(0, 1)
    return made


def compute(kv, made):
    """As if all known tokens' KV had been computed."""
    made.num_confirmed_tokens = made.num_tokens
    kv.cache_blocks(made, made.num_tokens)


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
    kv.cache_blocks(first, 12)
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
        ({"prompt_embeds_digest": b"a"}, {}, 0),
        ({"prompt_embeds_digest": b"a"}, {"prompt_embeds_digest": b"a"}, 8),
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


def test_eviction_forgets_the_block():
    kv = manager(num_blocks=4)
    first = request(range(9))
    assert kv.admit(first)
    compute(kv, first)
    kv.release(first)
    other = request(range(20, 28))
    assert kv.admit(other)  # takes the unhashed block and the tail of the two cached ones
    again = request(range(5))
    assert kv.admit(again) is False
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
    with pytest.raises(ConfigError, match="KV group"):
        KVManager([], 16, enable_prefix_caching=True)
    window = KVGroup(index=0, layers=(0,), block_size=4, kind="window", window=8)
    with pytest.raises(UnsupportedError, match="window"):
        KVManager([window], 16, enable_prefix_caching=True)
