"""Which full blocks hold which tokens: a chained hash, and a map from it to blocks.

A block's hash covers its own tokens, everything before them (through its parent's hash) and
whatever else decides the keys and values. SHA-256, so that two prompts never collide on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pelton.core.kv.block_pool import Block, BlockKey

ROOT_HASH = hashlib.sha256(b"pelton prefix cache, version 1").digest()
"""Parent of a first block. Fixed, so that every process computes the same hashes."""


def extra_key(kind: str, value: bytes) -> bytes:
    """Bytes of one thing besides tokens that decides a block's content.

    Kind and lengths are part of it, so that no value of one kind equals a value of another.
    """
    tag = kind.encode()
    return b"%d:%b%d:%b" % (len(tag), tag, len(value), value)


def hash_block(parent: bytes, tokens: bytes, extras: Sequence[bytes] = ()) -> bytes:
    """Hash of a full block.

    Args:
        parent: hash of the block before it, or ROOT_HASH.
        tokens: the block's int32 ids as bytes (the block size fixes their number).
        extras: from `extra_key`.
    """
    digest = hashlib.sha256(parent)
    digest.update(tokens)
    for extra in extras:
        digest.update(extra)
    return digest.digest()


class PrefixCache:
    """Key -> blocks. Two requests that compute the same tokens at the same time give two blocks for
    one key: they stay, because a block table that the device has seen is only ever appended to."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, list[Block]] = {}

    def get(self, key: BlockKey) -> Block | None:
        """A block that holds this content, or None."""
        found = self._blocks.get(key)
        return found[0] if found else None

    def get_all(self, key: BlockKey) -> list[Block]:
        return list(self._blocks.get(key, ()))

    def insert(self, block: Block, key: BlockKey) -> None:
        """The block is full, and its KV is computed."""
        assert block.key is None
        block.key = key
        self._blocks.setdefault(key, []).append(block)

    def remove(self, block: Block) -> None:
        """The block's content is gone, or not to be trusted."""
        assert block.key is not None
        same = self._blocks[block.key]
        same.remove(block)
        if not same:
            del self._blocks[block.key]
        block.key = None

    def blocks(self) -> list[Block]:
        """Every block in the map."""
        return [block for same in self._blocks.values() for block in same]
