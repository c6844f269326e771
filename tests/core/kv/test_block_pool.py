"""Order of reuse, and counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.core.kv.block_pool import BlockPool
from pelton.errors import ConfigError, IntegrityError


def ids(blocks):
    return [block.block_id for block in blocks]


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_usable == pool.num_free == 4
    assert ids(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError):
        pool.take(1)
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(1)


def test_blocks_without_content_are_reused_first():
    pool = BlockPool(6)
    a, b, c, d = pool.take(4)
    a.key, c.key = (0, b"a"), (0, b"c")
    pool.release([d, c, b, a])
    # b was freed last among those without content; then never used 5; then c before a.
    assert ids(pool.free_blocks()) == [2, 4, 5, 3, 1]


def test_touch_takes_a_block_out_of_the_middle():
    pool = BlockPool(5)
    blocks = pool.take(3)
    for block in blocks:
        block.key = (0, bytes([block.block_id]))
    pool.release(reversed(blocks))
    pool.touch([blocks[1]])
    assert ids(pool.free_blocks()) == [4, 3, 1]
    pool.touch([blocks[1]])
    pool.release([blocks[1]])
    assert pool.num_free == 3
    pool.release([blocks[1]])
    assert ids(pool.free_blocks()) == [4, 3, 1, 2]


def test_move_to_front():
    pool = BlockPool(4)
    pool.move_to_front(pool.blocks[3])
    assert ids(pool.free_blocks()) == [3, 1, 2]


def test_torn_lists_are_found():
    pool = BlockPool(4)
    pool.num_free = 2
    with pytest.raises(IntegrityError, match="num_free"):
        pool.free_blocks()
    pool = BlockPool(4)
    pool.blocks[2].previous = pool.blocks[3]
    with pytest.raises(IntegrityError, match="torn"):
        pool.free_blocks()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_calls_equals_a_plain_list(data):
    """The free list against a list of ids and a count per block, after every call."""
    size = data.draw(st.integers(2, 9), label="size")
    pool = BlockPool(size)
    free, uses, keyed = list(range(1, size)), [0] * size, set()
    for step in range(data.draw(st.integers(1, 40), label="steps")):
        call = data.draw(st.sampled_from(["take", "key", "touch", "release", "forget"]))
        used = [i for i in range(1, size) if uses[i]]
        cached = [i for i in free if i in keyed]
        if call == "take":
            count = data.draw(st.integers(0, len(free)))
            assert ids(pool.take(count)) == free[:count]
            for i in free[:count]:
                uses[i] = 1
                pool.blocks[i].key = None  # what the cache does when content is evicted
                keyed.discard(i)
            del free[:count]
        elif call == "key" and used:
            i = data.draw(st.sampled_from(used))
            pool.blocks[i].key = (0, bytes([step]))
            keyed.add(i)
        elif call == "touch" and used + cached:
            i = data.draw(st.sampled_from(used + cached))
            pool.touch([pool.blocks[i]])
            uses[i] += 1
            if i in free:
                free.remove(i)
        elif call == "release" and used:
            i = data.draw(st.sampled_from(used))
            pool.release([pool.blocks[i]])
            uses[i] -= 1
            if not uses[i]:
                free.insert(len(free) if i in keyed else 0, i)
        elif call == "forget" and cached:
            i = data.draw(st.sampled_from(cached))
            pool.blocks[i].key = None
            pool.move_to_front(pool.blocks[i])
            keyed.discard(i)
            free.remove(i)
            free.insert(0, i)
        assert ids(pool.free_blocks()) == free
        assert pool.num_free == len(free)
        assert [block.ref_count for block in pool.blocks] == uses
