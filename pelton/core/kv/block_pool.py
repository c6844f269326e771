"""Blocks of the KV cache: who uses them, and in which order free ones are taken again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pelton.core.plan import Int32Array
from pelton.errors import ConfigError, IntegrityError

BlockKey = tuple[int, bytes]
"""Identity of a full block's content: KV group index, and the chained hash of its tokens."""


class Block:
    """One page of every layer of a group. Made once; `previous` and `next` thread the free list."""

    __slots__ = ("block_id", "key", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: BlockKey | None = None
        self.previous: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count}, cached={self.key is not None})"


class BlockPool:
    """All blocks, and a doubly linked list of the free ones: a prefix hit leaves it in O(1).

        head <-> no content worth keeping ... least recently used ... most recently used <-> tail

    Taken from the head. Block 0 is the null block: what padding points at, never handed out.

    Raises ConfigError if not even one block beside the null block exists.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (one is the null block), got {num_blocks}."
            )
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null = self.blocks[0]
        self.num_usable = num_blocks - 1
        self.num_free = 0
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next = self._tail
        self._tail.previous = self._head
        for block in self.blocks[1:]:
            self._link(block, self._tail)

    def take(self, num_blocks: int) -> list[Block]:
        """The `num_blocks` best blocks to reuse, each now used once.

        A block may still carry the key of its old content: the caller forgets it. The caller has
        checked `num_free`.
        """
        taken = []
        for _ in range(num_blocks):
            block = self._head.next
            assert block is not None
            assert block is not self._tail, "the caller checks num_free"
            self._unlink(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more user of each of `blocks`."""
        for block in blocks:
            if block.ref_count == 0:
                self._unlink(block)
            block.ref_count += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """One user less. Give a request's blocks tail first: then its tail is reused first."""
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                self._link(block, self._tail if block.key is not None else self._head.next)

    def move_to_front(self, block: Block) -> None:
        """A free block has lost its content: take it before any that has some."""
        self._unlink(block)
        self._link(block, self._head.next)

    def _link(self, block: Block, before: Block | None) -> None:
        assert before is not None
        assert before.previous is not None
        block.previous, block.next = before.previous, before
        before.previous.next = block
        before.previous = block
        self.num_free += 1

    def _unlink(self, block: Block) -> None:
        assert block.previous is not None
        assert block.next is not None
        block.previous.next = block.next
        block.next.previous = block.previous
        block.previous = block.next = None
        self.num_free -= 1

    def free_blocks(self) -> list[Block]:
        """The free list, next to be taken first. Raises IntegrityError if it is torn."""
        found: list[Block] = []
        before, block = self._head, self._head.next
        while block is not self._tail:
            if block is None or block.previous is not before or len(found) > len(self.blocks):
                raise IntegrityError(f"The free list is torn after block {before.block_id}.")
            found.append(block)
            before, block = block, block.next
        if len(found) != self.num_free:
            raise IntegrityError(f"num_free is {self.num_free}, the free list holds {len(found)}.")
        return found


def block_ids(blocks: Sequence[Block]) -> Int32Array:
    """[num_blocks] int32."""
    return np.array([block.block_id for block in blocks], dtype=np.int32)
