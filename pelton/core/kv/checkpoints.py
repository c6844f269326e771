"""Copies of rows' recurrent state, kept for prefix hits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pelton.core.kv.block_pool import Block, BlockKey, BlockPool, block_ids
from pelton.core.kv.prefix_cache import PrefixCache
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import StateSave
from pelton.core.request import Request
from pelton.errors import IntegrityError


class _Pending(NamedTuple):
    """A checkpoint that a step in flight writes. key: None while some of its tokens are unknown."""

    length: int
    key: BlockKey | None
    blocks: list[Block]


class Checkpoints:
    """The state after k * interval tokens, of some prefixes; each lies in `pages` blocks.

    They are made of what is left over. One is taken only from free blocks, after everybody has got
    theirs, and given up when somebody needs more: no request waits or yields for a checkpoint.
    While the step that writes one is in flight its blocks are used; when its result has come they
    are cached and free. Nobody owns a cached checkpoint. It is found by its first block, and who
    loses one of its blocks to a new use loses all.

    A row reads its checkpoint before anything else of its first step runs, and on the device a
    block's next owner comes later: so even blocks that are being read, or written, may be given
    away, to the next step.

    Of what a request generates only the newest checkpoint is kept: a later prompt begins with the
    whole answer, and seldom with a part of it. Those of its prompt stay, for who shares a part.

    Without recurrent layers (no group) nothing is ever wanted, found or held.
    """

    def __init__(self, pool: BlockPool, cache: PrefixCache, group: KVGroup | None) -> None:
        self._pool = pool
        self._cache = cache
        self.interval = 0 if group is None else group.block_size
        self._pages = 0 if group is None else group.pages
        self._group = -1 if group is None else group.index
        self._pending: dict[Request, list[_Pending]] = {}
        self._pending_keys: set[BlockKey] = set()
        self._newest: dict[Request, BlockKey] = {}
        self.num_pending_blocks = 0

    def find(self, request: Request, length: int) -> list[Block]:
        """The blocks of the checkpoint after `length` tokens, which was found to exist; they are
        now the last to be used anew."""
        if not self.interval or not length:
            return []
        blocks = self._cache.get_all(self._key(request, length))
        assert len(blocks) == self._pages, "a hit that was just found"
        self._pool.touch(blocks)
        self._pool.release(blocks)
        return blocks

    def first_wanted(self, request: Request, first: int, last: int) -> int | None:
        """The shortest length in (first, last], all of known and hashed tokens, at which a
        checkpoint can be taken that is not there yet."""
        if self._can_take():
            for number in range(first // self.interval + 1, last // self.interval + 1):
                if self._is_new(self._key(request, number * self.interval)):
                    return number * self.interval
        return None

    def take(self, requests: Iterable[Request]) -> list[StateSave]:
        """Checkpoints of the requests of a step that is otherwise complete, whose computed tokens
        count what it will compute. Where drafts are in flight nobody knows where a row will stand.
        """
        saves: list[StateSave] = []
        if not self.interval:
            return saves
        for request in requests:
            length = request.num_computed_tokens
            if length % self.interval or request.has_drafts_in_flight or not self._can_take():
                continue
            key = None
            if length // self.interval <= len(request.block_hashes[self._group]):
                key = self._key(request, length)
                if not self._is_new(key):
                    continue
                self._pending_keys.add(key)
            blocks = self._pool.take(self._pages)
            for block in blocks:
                self.evict(block)
            self._pending.setdefault(request, []).append(_Pending(length, key, blocks))
            self.num_pending_blocks += self._pages
            request.next_settle_length = min(request.next_settle_length, length)
            assert request.ref is not None
            saves.append(StateSave(ref=request.ref, length=length, block_ids=block_ids(blocks)))
        return saves

    def settle(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens, all known and hashed, are computed."""
        pending = self._pending.pop(request, [])
        for checkpoint in pending:
            if checkpoint.length > num_tokens:
                self._pending.setdefault(request, []).append(checkpoint)
                continue
            key = self._key(request, checkpoint.length)
            if self._cache.get(key) is None:
                for block in checkpoint.blocks:
                    self._cache.insert(block, key)
            self._release(checkpoint)
            if checkpoint.length > request.prompt_len:
                self._replace(request, key)

    def _replace(self, request: Request, key: BlockKey) -> None:
        """Forget the last checkpoint of what the request has generated."""
        before = self._newest.get(request)
        if before is not None:
            for block in self._cache.get_all(before)[:1]:
                self.evict(block)
        self._newest[request] = key

    def next_length(self, request: Request, default: int) -> int:
        """Tokens of the shortest prefix whose checkpoint is to be settled, at most `default`."""
        pending = self._pending.get(request)
        return min(default, pending[0].length) if pending else default

    def drop(self, request: Request) -> None:
        """Its steps in flight do not count any more."""
        self._newest.pop(request, None)
        for checkpoint in self._pending.pop(request, ()):
            self._release(checkpoint)

    def make_free(self, num_blocks: int) -> None:
        """Give up the newest of what is in flight, until as many blocks are free."""
        while self._pool.num_free < num_blocks and self._pending:
            request, pending = self._pending.popitem()
            self._release(pending.pop())
            if pending:
                self._pending[request] = pending

    def evict(self, block: Block) -> None:
        """A cached block gets another use. A checkpoint goes as a whole, whichever block it was."""
        key = block.key
        if key is None:
            return
        if key[0] != self._group:
            self._cache.remove(block)
            return
        for page in self._cache.get_all(key):
            self._cache.remove(page)
            if page.ref_count == 0:
                self._pool.move_to_front(page)

    def pending_blocks(self) -> list[Block]:
        return [
            block for found in self._pending.values() for item in found for block in item.blocks
        ]

    def check(self) -> None:
        """Raise IntegrityError unless every cached checkpoint is whole and free, and what is
        pending is counted."""
        sizes: dict[BlockKey, int] = {}
        for block in self._cache.blocks():
            if block.key is not None and block.key[0] == self._group:
                sizes[block.key] = sizes.get(block.key, 0) + 1
                if block.ref_count:
                    raise IntegrityError(f"{block} of a cached checkpoint is used.")
        if any(size != self._pages for size in sizes.values()):
            raise IntegrityError(f"Checkpoints are not of {self._pages} blocks: {sizes.values()}.")
        pending = [item for found in self._pending.values() for item in found]
        keys = {item.key for item in pending if item.key is not None}
        if keys != self._pending_keys or len(self.pending_blocks()) != self.num_pending_blocks:
            raise IntegrityError("The counts of checkpoints in flight are wrong.")
        if not all(self._pending.values()) or keys & sizes.keys():
            raise IntegrityError("A checkpoint in flight is lost, or made twice.")

    def _can_take(self) -> bool:
        return 0 < self._pages <= self._pool.num_free

    def _is_new(self, key: BlockKey) -> bool:
        return key not in self._pending_keys and self._cache.get(key) is None

    def _key(self, request: Request, length: int) -> BlockKey:
        return self._group, request.block_hashes[self._group][length // self.interval - 1]

    def _release(self, checkpoint: _Pending) -> None:
        if checkpoint.key is not None:
            self._pending_keys.discard(checkpoint.key)
        self.num_pending_blocks -= self._pages
        self._pool.release(checkpoint.blocks)
