"""Hashes that cannot be confused, and the map."""

from __future__ import annotations

import itertools

import numpy as np

from pelton.core.kv.block_pool import BlockPool
from pelton.core.kv.prefix_cache import ROOT_HASH, PrefixCache, extra_key, hash_block


def tokens(*ids):
    return np.array(ids, dtype=np.int32).tobytes()


def test_hash_depends_on_everything_and_on_nothing_else():
    ids = tokens(1, 2, 3, 4)
    other_parent = hash_block(ROOT_HASH, tokens(9, 9, 9, 9))
    hashes = [
        hash_block(ROOT_HASH, ids),
        hash_block(other_parent, ids),
        hash_block(ROOT_HASH, tokens(1, 2, 4, 3)),
        hash_block(ROOT_HASH, ids, [extra_key("salt", b"x")]),
        hash_block(ROOT_HASH, ids, [extra_key("adapter", b"x")]),
        hash_block(ROOT_HASH, ids, [extra_key("salt", b"x"), extra_key("adapter", b"x")]),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hash_block(ROOT_HASH, ids) == hashes[0]
    # Fixed for ever: processes that share a cache must agree.
    assert hashes[0].hex().startswith("e9560f9de252e315")


def test_extra_keys_of_two_kinds_never_collide():
    values = [b"", b"x", b"salt", b"1:x", b"x7:adapter1:x"]
    pairs = itertools.product(["salt", "adapter", "embeds"], values)
    made = [extra_key(kind, value) for kind, value in pairs]
    assert len(set(made)) == len(made)
    joined = {a + b for a, b in itertools.product(made, made)}
    assert len(joined) == len(made) ** 2


def test_duplicates_stay_until_each_is_removed():
    pool, cache = BlockPool(4), PrefixCache()
    key = (0, b"k")
    a, b = pool.take(2)
    cache.insert(a, key)
    cache.insert(b, key)
    assert cache.get_all(key) == [a, b]
    cache.remove(a)
    assert cache.get(key) is b
    assert a.key is None
    cache.remove(b)
    assert cache.get(key) is None
    assert cache.blocks() == []
    assert cache.get((1, b"k")) is None
