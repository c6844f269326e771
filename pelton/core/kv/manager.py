"""Block tables of requests: admission with prefix hits, growth, release; what is cached when."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pelton.core.kv.block_pool import Block, BlockPool, block_ids
from pelton.core.kv.checkpoints import Checkpoints
from pelton.core.kv.groups import smallest_reusable_prefix, with_tables
from pelton.core.kv.host_pages import HostPages, MoveCosts
from pelton.core.kv.prefix_cache import ROOT_HASH, PrefixCache
from pelton.core.kv.request_hashes import extend_hashes, hash_of
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import NO_COPIES, BlockAppend, Int32Array, PageCopies, StateSave
from pelton.core.request import Request
from pelton.errors import IntegrityError, UnsupportedError

_NEVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """num_hits: tokens that the prefix cache provides. state_blocks: of the checkpoint of recurrent
    state after these; empty if nothing is hit, or there is no such state. restores: what host pages
    provide beside."""

    num_hits: int
    state_blocks: Int32Array
    restores: PageCopies = NO_COPIES


class KVManager:
    """Every request's block tables, one per KV group, out of one pool.

    Nothing here is hashed before its KV is known to be computed: `settle` is called when a step's
    result has arrived, so an abort or a fault in between leaves nothing behind.

    A window group's table keeps its length, but its blocks wholly left of the window are given
    back, and the null block stands in their place. No plan says so: a device that has computed no
    fewer tokens than are confirmed here leaves those entries out by itself (ops/build_inputs).

    A preempted request's KV may be saved to host pages (core/kv/host_pages.py), cached blocks and
    all: one of them may be evicted before the request returns, and then what was saved behind it
    would be worth nothing. What is still cached when it returns is not copied back.

    group_matches: per group the tokens that it alone had in the cache on admissions, used or not;
    the hit of a request is the longest prefix that all groups have, so the smallest is to blame.

    Without groups nothing is kept of any request, and none ever waits for a block.

    Raises UnsupportedError for a kind of group that is not served, and for host pages beside
    recurrent layers.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        *,
        enable_prefix_caching: bool,
        host: HostPages | None = None,
    ) -> None:
        for group in groups:
            if group.kind not in ("full", "window", "recurrent"):
                raise UnsupportedError(
                    f"KV kind {group.kind!r} (group {group.index}) is not supported."
                )
        tabled = with_tables(groups)
        self.block_sizes = tuple(group.block_size for group in tabled)
        self._windows = tuple(group.window for group in tabled)
        self._window_groups = tuple(i for i, group in enumerate(tabled) if group.window is not None)
        # Of all groups. A hit needs the last state alone, as if its window were of one token.
        self._hash_sizes = tuple(group.block_size for group in groups)
        self._hit_windows = tuple(group.window if group.has_table else 1 for group in groups)
        self._hit_step = smallest_reusable_prefix(groups)
        self.group_matches = [0] * len(groups)
        self._pool = BlockPool(num_blocks)
        self._cache = PrefixCache()
        self._enable_caching = enable_prefix_caching
        states = [group for group in groups if not group.has_table] if enable_prefix_caching else []
        self._checkpoints = Checkpoints(self._pool, self._cache, states[0] if states else None)
        self.host = host or HostPages(0, MoveCosts())
        if self.host.num_pages and len(tabled) < len(groups):
            raise UnsupportedError("Host pages hold no recurrent state.")

    @property
    def num_usable(self) -> int:
        """Blocks that requests may hold (all but the null block)."""
        return self._pool.num_usable

    @property
    def num_used(self) -> int:
        return self._pool.num_usable - self._pool.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that the KV of `num_tokens` tokens takes, over all groups. Checkpoints take none:
        they are made of what is left over."""
        return sum(-(-num_tokens // size) for size in self.block_sizes)

    def max_tokens(self) -> int:
        """The longest sequence whose KV fits the empty pool, in tokens."""
        if not self.block_sizes:
            return _NEVER
        lengths = range(self.num_usable * max(self.block_sizes) + 1)
        return bisect_right(lengths, self.num_usable, key=self.num_blocks_for) - 1

    def admit(self, request: Request) -> Admission | None:
        """Give a request blocks for all its known tokens, the cached prefix first.

        On success `request.num_computed_tokens` is at most request.max_prefix_hit: the length of
        the hit, a multiple of every block size; or all that was saved of the request, if that is
        more. On failure (None: too few free blocks) nothing has changed.

        A window group, too, gets blocks for every token that is to be computed, and gives them back
        as the window passes: so a prompt never has to wait, or to preempt, half-way.
        """
        alone = self._hits_alone(request)
        length = num_hits = self._common_hit(request, alone)
        saved = request.saved
        if saved is not None and num_hits < saved.num_tokens <= request.max_prefix_hit:
            length = saved.num_tokens
        first = self._num_passed(length)
        hits = [self._hit_blocks(request, group, i, length) for group, i in enumerate(first)]
        num_new = [
            -(-request.num_tokens // size) - passed - len(found)
            for size, passed, found in zip(self.block_sizes, first, hits)
        ]
        assert length > num_hits or all(
            (passed + len(found)) * size == length
            for size, passed, found in zip(self.block_sizes, first, hits)
        ), "a hit that was just found"
        idle_hits = sum(block.ref_count == 0 for found in hits for block in found)
        if sum(num_new) > self._num_available - idle_hits:
            return None
        for found in hits:
            self._pool.touch(found)
        state_blocks = block_ids(self._checkpoints.find(request, num_hits))
        request.blocks = [
            [self._pool.null] * passed + found + self._take(count)
            for passed, found, count in zip(first, hits, num_new)
        ]
        request.num_cached_blocks = [passed + len(found) for passed, found in zip(first, hits)]
        request.num_passed_blocks = first
        request.num_computed_tokens = length
        for group, hit in enumerate(alone):
            self.group_matches[group] += hit
        self._measure(request)
        if length == num_hits:
            self.forget_saved(request)
            return Admission(num_hits=num_hits, state_blocks=state_blocks)
        self.host.num_restored_tokens += length - num_hits
        return Admission(
            num_hits=num_hits, state_blocks=state_blocks, restores=self._restores(request)
        )

    def _restores(self, request: Request) -> PageCopies:
        """From its pages into the blocks that are not hits."""
        blocks: list[int] = []
        pages: list[int] = []
        saved = request.saved
        assert saved is not None
        for table, hits, start, own in zip(
            request.blocks, request.num_cached_blocks, saved.first, saved.pages
        ):
            blocks += [block.block_id for block in table[hits : start + len(own)]]
            pages += own[hits - start :]
        return PageCopies.of(blocks, pages)

    def chunk(self, request: Request, num_tokens: int) -> int:
        """How many of a request's next `num_tokens` known tokens a step should compute: fewer where
        it should end at a checkpoint that is not there yet."""
        interval, computed = self._checkpoints.interval, request.num_computed_tokens
        end = computed + num_tokens
        if not interval or computed // interval == end // interval:
            return num_tokens
        wanted = self._checkpoints.first_wanted(request, computed, end)
        return num_tokens if wanted is None else wanted - computed

    def checkpoint(self, requests: Iterable[Request]) -> list[StateSave]:
        """What of recurrent state a step of these requests should keep; call it last, when all of
        them have their blocks."""
        return self._checkpoints.take(requests)

    def grow(self, request: Request, num_tokens: int) -> list[BlockAppend] | None:
        """Make the tables cover `num_tokens` tokens; None, with nothing changed, if they cannot."""
        if num_tokens <= request.block_capacity:
            return []
        missing = [
            -(-num_tokens // size) - len(table)
            for size, table in zip(self.block_sizes, request.blocks)
        ]
        if sum(missing) > self._num_available:
            return None
        assert request.ref is not None
        appends = []
        for group, count in enumerate(missing):
            if count <= 0:
                continue
            table = request.blocks[group]
            taken = self._take(count)
            appends.append(
                BlockAppend(
                    ref=request.ref, group=group, first=len(table), block_ids=block_ids(taken)
                )
            )
            table += taken
        self._measure(request)
        return appends

    def settle(self, request: Request, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens exists: let others find their full blocks, and
        give back what no later token of a window group sees."""
        if self._enable_caching:
            self._extend_hashes(request, num_tokens)
            for group, size in enumerate(self.block_sizes):
                hashes = request.block_hashes[group]
                first, last = request.num_cached_blocks[group], num_tokens // size
                for i in range(first, last):
                    self._cache.insert(request.blocks[group][i], (group, hashes[i]))
                request.num_cached_blocks[group] = max(first, last)
            self._checkpoints.settle(request, num_tokens)
        for group, passed in enumerate(self._num_passed(num_tokens)):
            table, first = request.blocks[group], request.num_passed_blocks[group]
            if passed > first:
                self._pool.release(reversed(table[first:passed]))
                table[first:passed] = [self._pool.null] * (passed - first)
                request.num_passed_blocks[group] = passed
        self._measure(request)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks back, and save what they hold to host pages if that pays.

        What counts as held are confirmed tokens. If none of the life's steps has ended the pages
        that it was to be restored from are what is sure.
        """
        if request.saved is None and request.num_confirmed_tokens:
            tables = [
                [
                    block.block_id
                    for block in table[passed : -(-request.num_confirmed_tokens // size)]
                ]
                for table, passed, size in zip(
                    request.blocks, request.num_passed_blocks, self.block_sizes
                )
            ]
            request.saved = self.host.save(
                request.num_confirmed_tokens, request.num_passed_blocks, tables
            )
        self._release_blocks(request)

    def forget_saved(self, request: Request) -> None:
        """Its host pages are of no use any more, or cannot be trusted."""
        if request.saved is not None:
            self.host.forget(request.saved)
            request.saved = None

    def release(self, request: Request) -> None:
        """Take a request's blocks back, and its host pages. What is cached can still be hit."""
        self.forget_saved(request)
        self._release_blocks(request)

    def _release_blocks(self, request: Request) -> None:
        self._checkpoints.drop(request)
        for table, passed in zip(request.blocks, request.num_passed_blocks):
            self._pool.release(reversed(table[passed:]))
        request.blocks = []
        request.num_cached_blocks = []
        request.num_passed_blocks = []
        request.block_capacity = 0

    def release_distrusted(self, request: Request) -> None:
        """As `release`, for a request that went wrong: its KV may be what is wrong.

        Every unused block with the content of this request is forgotten, whoever computed it: an
        earlier life of the request, or someone whose bad block this one hit. That costs a
        recomputation at most, and heals the cache. A block in use stays: if it is bad its user
        fails too, and the last one takes it along.
        """
        self.release(request)
        for group, hashes in enumerate(request.block_hashes):
            for block_hash in hashes:
                for block in self._cache.get_all((group, block_hash)):
                    if block.ref_count == 0:
                        self._cache.remove(block)
                        self._pool.move_to_front(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, with nothing changed, while any block is in use."""
        if self.num_used:
            return False
        for block in self._cache.blocks():
            self._cache.remove(block)
        return True

    def _hits_alone(self, request: Request) -> list[int]:
        """Tokens of the longest prefix that each group alone has in the cache."""
        if not self._enable_caching:
            return [0] * len(self._hash_sizes)
        self._extend_hashes(request, request.num_tokens)
        limit = request.max_prefix_hit
        return [self._longest_hit(request, group, limit) for group in range(len(self._hash_sizes))]

    def _common_hit(self, request: Request, alone: Sequence[int]) -> int:
        """Tokens of the longest prefix that all groups have, a multiple of every block size.

        Whatever prefix a full group has, it has every shorter one too. A window group need not: the
        run of blocks before a shorter end may be gone; nor need a recurrent one: a state may never
        have been kept. So they are asked again until all agree.
        """
        length, agreed = min(alone, default=0), 0
        while length != agreed:
            length -= length % self._hit_step
            agreed = length
            for group, window in enumerate(self._hit_windows):
                if window is not None:
                    length = min(length, self._longest_hit(request, group, length))
        return length

    def _longest_hit(self, request: Request, group: int, limit: int) -> int:
        """Tokens of the longest prefix of at most `limit` tokens that a group has in the cache."""
        size, window = self._hash_sizes[group], self._hit_windows[group]
        hashes = request.block_hashes[group][: limit // size]
        if window is None:
            for i, block_hash in enumerate(hashes):
                if self._cache.get((group, block_hash)) is None:
                    return i * size
            return len(hashes) * size
        # From right to left: [first, end) is the run found so far, and a gap moves its end there.
        # The last block is asked for even where a window of 1 needs none: what nobody has computed
        # is no hit.
        first = end = len(hashes)
        while first > max(min(_num_passed(end * size, size, window), end - 1), 0):
            first -= 1
            if self._cache.get((group, hashes[first])) is None:
                end = first
        return end * size

    def _hit_blocks(self, request: Request, group: int, first: int, length: int) -> list[Block]:
        """The cached blocks from table index `first` up to token `length`, until one is missing."""
        found: list[Block] = []
        if not self._enable_caching:
            return found
        for block_hash in request.block_hashes[group][first : length // self.block_sizes[group]]:
            block = self._cache.get((group, block_hash))
            if block is None:
                break
            found.append(block)
        return found

    def _num_passed(self, num_computed_tokens: int) -> list[int]:
        """Per group the blocks, from the first, that no token from there on sees."""
        return [
            0 if window is None else _num_passed(num_computed_tokens, size, window)
            for size, window in zip(self.block_sizes, self._windows)
        ]

    @property
    def _num_available(self) -> int:
        return self._pool.num_free + self._checkpoints.num_pending_blocks

    def _take(self, num_blocks: int) -> list[Block]:
        self._checkpoints.make_free(num_blocks)
        taken = self._pool.take(num_blocks)
        for block in taken:
            self._checkpoints.evict(block)
        return taken

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        extend_hashes(request, self._hash_sizes, num_tokens)

    def _measure(self, request: Request) -> None:
        """Refresh the two token counts that spare the hot path a walk over groups."""
        request.block_capacity = min(
            (len(table) * size for table, size in zip(request.blocks, self.block_sizes)),
            default=_NEVER,
        )
        cached, passed = request.num_cached_blocks, request.num_passed_blocks
        lengths = []
        if self._enable_caching:
            lengths += [(count + 1) * size for count, size in zip(cached, self.block_sizes)]
        for group in self._window_groups:
            window = self._windows[group]
            assert window is not None
            lengths.append((passed[group] + 1) * self.block_sizes[group] + window - 1)
        request.next_settle_length = self._checkpoints.next_length(
            request, min(lengths, default=_NEVER)
        )

    def check(self, requests: Sequence[Request]) -> None:
        """Raise IntegrityError unless pool, cache, host pages and tables agree. requests: all that
        are unfinished."""
        self.host.check([request.saved for request in requests if request.saved is not None])
        free = self._pool.free_blocks()
        uses: Counter[int] = Counter()
        owners: dict[int, int] = {}
        self._checkpoints.check()
        for block in self._checkpoints.pending_blocks():
            uses[block.block_id] += 1
            owners[block.block_id] = -1
        for request in requests:
            self._check_request(request)
            for group, table in enumerate(request.blocks):
                for block in table[request.num_passed_blocks[group] :]:
                    uses[block.block_id] += 1
                    if owners.setdefault(block.block_id, group) != group:
                        raise IntegrityError(f"{block} stands in tables of two groups.")
        for block in self._pool.blocks:
            if block.ref_count != uses[block.block_id]:
                raise IntegrityError(f"{block} is used {uses[block.block_id]} times.")
            if block.ref_count > 1 and block.key is None:
                raise IntegrityError(f"{block} is shared, and its content is not known.")
        if self._pool.null.ref_count or self._pool.null.key is not None:
            raise IntegrityError("The null block is in use.")
        if any(block.ref_count for block in free) or len(free) + len(uses) != self.num_usable:
            raise IntegrityError(
                f"{len(free)} free and {len(uses)} used blocks are not {self.num_usable}."
            )
        cached = {block.block_id for block in self._cache.blocks()}
        if cached != {block.block_id for block in self._pool.blocks if block.key is not None}:
            raise IntegrityError("The map of cached blocks and the blocks' keys differ.")

    def _check_request(self, request: Request) -> None:
        computed = min(request.num_confirmed_tokens, request.num_tokens)
        if request.blocks and request.num_passed_blocks != self._num_passed(computed):
            raise IntegrityError(
                f"{request.request_id}: {request.num_passed_blocks} blocks per group are given "
                f"back, and the windows after {computed} tokens have passed others."
            )
        for group, table in enumerate(request.blocks):
            parent = ROOT_HASH
            size = self.block_sizes[group]
            passed = request.num_passed_blocks[group]
            if any((block is self._pool.null) != (i < passed) for i, block in enumerate(table)):
                raise IntegrityError(f"{request.request_id}: the null block is out of place.")
            for i, block in enumerate(table):
                if i < passed:
                    parent = hash_of(request, parent, i * size, (i + 1) * size)
                    continue
                if (block.key is not None) != (i < request.num_cached_blocks[group]):
                    raise IntegrityError(f"{request.request_id}: {block} is cached out of turn.")
                if block.key is None:
                    break
                start, end = i * size, (i + 1) * size
                if end > computed:
                    raise IntegrityError(
                        f"{request.request_id}: {block} is cached up to token {end}, "
                        f"and only {computed} are computed."
                    )
                parent = hash_of(request, parent, start, end)
                if block.key != (group, parent):
                    raise IntegrityError(f"{request.request_id}: {block} holds other tokens.")


def _num_passed(num_computed_tokens: int, block_size: int, window: int) -> int:
    """Blocks wholly left of the window of the next token, at position num_computed_tokens: it sees
    itself and window - 1 tokens before."""
    return max(num_computed_tokens - window + 1, 0) // block_size
