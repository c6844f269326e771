"""Order of reuse, and counts."""

from __future__ import annotations

import pytest

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
