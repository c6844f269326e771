"""A toy engine around the scheduler: its device keeps real block contents, so that a wrong block, a
lost token or a stale cache entry changes what it samples."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pelton.config.cache import CacheConfig
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.config.scheduler import SchedulerConfig
from pelton.core.kv.host_pages import MoveCosts
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import OK, LogprobRows, SlotRef, StepPlan, StepResult
from pelton.core.request import Request
from pelton.core.scheduler import Scheduler
from pelton.errors import RequestFailed

VOCAB = 50


def _code(token: int, position: int) -> int:
    """What "computing" a token writes into its KV slot."""
    return (token * 1_000_003 + position * 7_919 + 12_345) % (2**40)


def _draw(total: int, seed: int) -> int:
    return ((total * 6_364_136_223_846_793_005 + seed * 1_442_695_040_888_963_407) >> 33) % VOCAB


def _fold(state: int, token: int) -> int:
    """Recurrent state after one token more; 0 before the first."""
    return (state * 1_000_003 + token * 7_919 + 17) % (2**40)


Windows = tuple[int | None, ...]


def _mix(totals: list[int]) -> int:
    """One number of what each group's layers see."""
    return sum((2 * group + 1) * total for group, total in enumerate(totals))


def reference(
    request: Request, max_model_len: int, windows: Windows = (None,), *, is_recurrent: bool = False
) -> tuple[list[int], str]:
    """Tokens and finish reason of a request that is alone; or what is pooled of it."""
    tokens = request.known_token_ids[: request.prompt_len].tolist()
    codes = [_code(token, i) for i, token in enumerate(tokens)]
    params, out = request.params, []
    state = 0
    for token in tokens:
        state = _fold(state, token)

    def seen() -> int:
        totals = [sum(codes if window is None else codes[-window:]) for window in windows]
        return _mix(totals) + is_recurrent * state

    if request.pooling is not None:
        all_codes, codes, state, states = codes, [], 0, []
        for token, code in zip(tokens, all_codes):
            codes.append(code)
            state = _fold(state, token)
            states.append(seen())
        return _pooled(request.pooling.method, states), "stop"
    while True:
        token = _draw(seen(), request.seed)
        state = _fold(state, token)
        codes.append(_code(token, len(codes)))
        out.append(token)
        if len(out) >= params.min_tokens:
            if not params.ignore_eos and token in request.eos_token_ids:
                return out, "stop"
            if token in params.stop_token_ids:
                return out, "stop"
        if len(out) == params.max_tokens or len(tokens) + len(out) == max_model_len:
            return out, "length"


def _pooled(method: str | None, states: list[int]) -> list[int]:
    """Of all tokens' hidden states, what each is."""
    return {"last": states[-1:], "mean": [sum(states)], "all": states}[method or ""]


@dataclass
class _Row:
    ref: SlotRef
    request_id: str
    tokens: list[int]
    computed: int
    tables: list[list[int]]
    seed: int
    prompt_len: int
    pooling: PoolingParams | None = None
    total: int = 0
    """Of hidden states, by method "mean"."""
    proposed: int = 0


@dataclass
class ToyDevice:
    """Runs a plan at once; its engine delivers the result later."""

    block_sizes: tuple[int, ...]
    windows: Windows
    num_blocks: int
    num_drafts: int
    max_model_len: int
    rng: random.Random
    num_slots: int
    checkpoint_pages: int = 0
    """Blocks of a checkpoint of recurrent state; 0: no layer is recurrent."""
    propose: Callable[[], int] | None = None
    """How many drafts a row has next: then results say so, and further ones are placeholders that
    nothing accepts. None: always K, and results do not say."""
    rows: dict[int, _Row] = field(default_factory=dict)
    faults: dict[tuple[str, int], int] = field(default_factory=dict)
    """(request id, index of the output) -> status."""
    broken: set[int] = field(default_factory=set)
    """Steps that fail: none of their copies and writes are what they should be."""

    def __post_init__(self) -> None:
        self.is_broken = False
        self.pages: dict[int, list[np.ndarray]] = {}
        """Host pages: per page what a block held in every group's memory."""
        self.kv = [np.full((self.num_blocks, size), -7, np.int64) for size in self.block_sizes]
        # Per block what a checkpoint has there, and per row a ring of states, as the worker has.
        self.state_pages = [-7] * self.num_blocks
        self.states = [[-7] * (1 + self.num_drafts) for _ in range(self.num_slots)]

    def _load_states(self, plan: StepPlan) -> None:
        """Before all else of a step."""
        for new in plan.new_rows:
            length = new.num_computed_tokens
            if not self.checkpoint_pages or not length:
                assert len(new.state_blocks) == 0
                continue
            assert len(new.state_blocks) == self.checkpoint_pages
            first = self.state_pages[new.state_blocks[0]]
            for i, block in enumerate(new.state_blocks.tolist()):
                assert self.state_pages[block] == first + i, "a page of another checkpoint"
            self.states[new.ref.slot][(length - 1) % (1 + self.num_drafts)] = first

    def _clear(self, blocks: list[int]) -> None:
        """New blocks are zeroed, or written, by their new owner."""
        for block in blocks:
            self.state_pages[block] = -8
            for kv in self.kv:
                kv[block] = -8

    def _save_states(self, plan: StepPlan) -> None:
        """After the forward pass."""
        saved = [block for save in plan.state_saves for block in save.block_ids.tolist()]
        assert len(set(saved)) == len(saved)
        assert 0 not in saved
        for save in plan.state_saves:
            row = self.rows[save.ref.slot]
            assert save.ref in plan.refs
            assert row.ref == save.ref
            assert row.computed == save.length
            state = self.states[save.ref.slot][(save.length - 1) % (1 + self.num_drafts)]
            assert len(save.block_ids) == self.checkpoint_pages
            self._clear(save.block_ids.tolist())
            for i, block in enumerate(save.block_ids.tolist()):
                self.state_pages[block] = state + i

    def run(self, plan: StepPlan) -> StepResult:
        self.is_broken = plan.step in self.broken
        result = self._run(plan)
        self.is_broken = False
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        self._load_states(plan)
        assert len(set(plan.offloads.page_ids.tolist())) == len(plan.offloads)
        for block, page in zip(plan.offloads.block_ids, plan.offloads.page_ids, strict=True):
            assert block != 0
            self.pages[int(page)] = [kv[block] + self.is_broken for kv in self.kv]
        for ref in plan.finished + plan.preempted:
            assert self.rows.pop(ref.slot).ref == ref
        for new in plan.new_rows:
            assert new.ref.slot not in self.rows
            assert new.prompt_len <= new.prefill_len
            assert 0 <= new.num_computed_tokens < new.prefill_len
            for size, window, ids in zip(self.block_sizes, self.windows, new.block_ids):
                assert len(ids) == -(-new.prefill_len // size)
                first = new.num_computed_tokens + 1 - (window or new.num_computed_tokens + 1)
                assert (ids[max(first, 0) // size :] != 0).all(), "a visible block is missing"
                self._clear(ids[-(-new.num_computed_tokens // size) :].tolist())
            for block, page in zip(new.restores.block_ids, new.restores.page_ids, strict=True):
                assert any(block in ids for ids in new.block_ids)
                for kv, saved in zip(self.kv, self.pages[int(page)], strict=True):
                    kv[block] = saved + self.is_broken
            self.rows[new.ref.slot] = _Row(
                new.ref,
                new.request_id,
                new.token_ids.tolist(),
                new.num_computed_tokens,
                [ids.tolist() for ids in new.block_ids],
                new.seed,
                new.prompt_len,
                new.pooling,
            )
        for append in plan.block_appends:
            row = self.rows[append.ref.slot]
            assert row.ref == append.ref
            assert append.first == len(row.tables[append.group])
            row.tables[append.group] += append.block_ids.tolist()
            self._clear(append.block_ids.tolist())
        size = plan.num_rows
        result = StepResult(
            step=plan.step,
            token_ids=np.full((size, 1 + self.num_drafts), -1, np.int32),
            num_sampled=np.zeros(size, np.int32),
            status=np.full(size, OK, np.int32),
            num_proposed=np.zeros(size, np.int32) if self.propose else None,
        )
        offsets = [0]
        for b, ref in enumerate(plan.refs):
            row = self.rows[ref.slot]
            assert row.ref == ref
            count, drafts = int(plan.num_scheduled_tokens[b]), int(plan.num_drafts[b])
            bound = int(plan.num_computed_bound[b])
            assert row.computed <= bound
            assert bound + count <= self.max_model_len - (row.pooling is None)
            if plan.bounds_are_exact:
                assert row.computed == bound
            else:
                assert self.num_drafts > 0
            offsets.append(offsets[-1] + (1 + drafts if plan.samples[b] else 0))
            if not plan.samples[b]:
                assert drafts == 0
                assert row.computed + count < len(row.tokens) + (row.pooling is not None)
                states = []
                for position in range(row.computed, row.computed + count):
                    self._write(row, position, row.tokens[position])
                    states.append(self._seen(row, position))
                self._pool(row, b, states, result)
                row.computed += count
                continue
            assert row.computed + count - drafts == len(row.tokens)
            index = len(row.tokens) - row.prompt_len
            for position in range(row.computed, len(row.tokens)):
                self._write(row, position, row.tokens[position])
            last = len(row.tokens) - 1
            sampled = [self._sample(row, last)]
            rejected = False
            for j in range(drafts):
                right = not rejected and self.rng.random() < 0.6
                right = right and (self.propose is None or j < row.proposed)
                draft = sampled[-1] if right else (sampled[-1] + 1) % VOCAB
                rejected = not right
                self._write(row, last + 1 + j, draft)
                if right:
                    sampled.append(self._sample(row, last + 1 + j))
            row.tokens += sampled
            row.computed = len(row.tokens) - 1
            row.proposed = self.propose() if self.propose else 0
            if result.num_proposed is not None:
                result.num_proposed[b] = row.proposed
            result.token_ids[b, : len(sampled)] = sampled
            result.num_sampled[b] = len(sampled)
            for i in range(len(sampled)):
                result.status[b] |= self.faults.get((row.request_id, index + i), OK)
        size = offsets[-1]
        if plan.step % 4 == 1:  # as if a row had asked
            result.logprobs = LogprobRows(
                offsets=np.array(offsets, np.int32),
                token_logprobs=np.zeros(size, np.float32),
                ranks=np.ones(size, np.int32),
                top_ids=np.zeros((size, 0), np.int32),
                top_logprobs=np.zeros((size, 0), np.float32),
            )
        self._save_states(plan)
        return result

    def _pool(self, row: _Row, b: int, states: list[int], result: StepResult) -> None:
        """states: of the row's next tokens. Some rows in mid-prefill give nothing, as with "step"
        where a chunk has no tag."""
        ends = row.computed + len(states) == len(row.tokens)
        if row.pooling is None:
            return
        if row.pooling.method == "all":
            result.pooled[b] = np.array(states)
        elif row.pooling.method == "mean":
            row.total = (row.total if row.computed else 0) + sum(states)
            if ends:
                result.pooled[b] = np.array([row.total])
        elif ends:
            result.pooled[b] = np.array(states[-1:])
        result.status[b] |= self.faults.get((row.request_id, row.computed), OK)

    def _write(self, row: _Row, position: int, token: int) -> None:
        ring, size = self.states[row.ref.slot], 1 + self.num_drafts
        ring[position % size] = _fold(ring[(position - 1) % size] if position else 0, token)
        for kv, size, table in zip(self.kv, self.block_sizes, row.tables):
            block = table[position // size]
            assert block != 0
            kv[block, position % size] = _code(token, position) + self.is_broken

    def _sample(self, row: _Row, position: int) -> int:
        return _draw(self._seen(row, position), row.seed)

    def _seen(self, row: _Row, position: int) -> int:
        """What stands for the hidden state there."""
        totals = []
        for kv, size, window, table in zip(self.kv, self.block_sizes, self.windows, row.tables):
            first = 0 if window is None else max(position - window + 1, 0)
            seen = range(first, position + 1)
            assert all(table[p // size] for p in seen), "the null block is seen"
            totals.append(sum(int(kv[table[p // size], p % size]) for p in seen))
        state = self.states[row.ref.slot][position % (1 + self.num_drafts)]
        return _mix(totals) + bool(self.checkpoint_pages) * state


class ToyEngine:
    """Scheduler and toy device, `depth` steps in flight, integrity checked after every call."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_sizes: tuple[int, ...] = (4,),
        windows: Windows | None = None,
        rows: int = 4,
        budget: int = 64,
        policy: str = "fcfs",
        depth: int = 2,
        num_drafts: int = 0,
        max_model_len: int = 60,
        long_prefill: int = 0,
        max_scored: int = 512,
        prefix_caching: bool = True,
        seed: int = 0,
        counts_drafts: bool = False,
        checkpoints: tuple[int, int] | None = None,
        host_pages: int = 0,
        move_costs: MoveCosts | None = None,
    ) -> None:
        """checkpoints: interval in tokens and blocks of each, for a model with recurrent layers."""
        self.rows, self.budget, self.depth = rows, budget, depth
        self.num_drafts, self.max_model_len = num_drafts, max_model_len
        self.windows = windows or (None,) * len(block_sizes)
        groups = [
            KVGroup(
                index=i,
                layers=(i,),
                block_size=size,
                kind="full" if window is None else "window",
                window=window,
            )
            for i, (size, window) in enumerate(zip(block_sizes, self.windows, strict=True))
        ]
        interval, pages = checkpoints or (0, 0)
        if checkpoints:
            groups.append(
                KVGroup(
                    index=len(groups),
                    layers=(len(groups),),
                    block_size=interval,
                    kind="recurrent",
                    pages=pages,
                )
            )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=rows,
                max_num_batched_tokens=budget,
                long_prefill_token_threshold=long_prefill,
                max_scored_tokens=max_scored,
                policy=policy,
                max_steps_in_flight=depth,
            ),
            CacheConfig(
                block_size=block_sizes[0],
                num_blocks=num_blocks,
                dtype="float32",
                enable_prefix_caching=prefix_caching,
                num_host_pages=host_pages,
            ),
            groups,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            num_speculative_tokens=num_drafts,
            move_costs=move_costs,
        )
        self.device = ToyDevice(
            block_sizes,
            self.windows,
            num_blocks,
            num_drafts,
            max_model_len,
            random.Random(seed),
            rows,
            pages,
        )
        if counts_drafts:
            self.device.propose = lambda: self.device.rng.randint(0, num_drafts)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def pool(self, request_id: str, prompt: list[int], method: str = "last", **own) -> Request:
        """A request that yields no tokens; its result stands among the outputs."""
        task = "token_embed" if method == "all" else "embed"
        params = PoolingParams(task=task, method=method)
        request = Request(request_id, prompt, params, seed=7, **own)
        return self._add(request)

    def add(self, request_id: str, prompt: list[int], **options) -> Request:
        """Request options by name, everything else is a sampling parameter."""
        names = ("priority", "cache_salt", "adapter", "prompt_embeds", "eos_token_ids")
        own = {name: options.pop(name) for name in names if name in options}
        options.setdefault("seed", 7)
        return self._add(Request(request_id, prompt, SamplingParams(**options), **own))

    def _add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def launch(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is None:
            assert self.in_flight or not self.scheduler.has_unfinished(), "nothing will ever run"
            return None
        assert 0 < plan.num_rows <= self.rows
        assert plan.num_tokens <= self.budget
        counts = plan.num_scheduled_tokens
        assert (counts >= 1).all()
        assert (counts[1:] >= counts[:-1]).all()
        assert (plan.num_drafts + plan.samples <= counts).all()
        if plan.is_one_each:
            assert ((counts == 1) & plan.samples & (plan.num_drafts == 0)).all()
        assert len({ref.slot for ref in plan.refs}) == plan.num_rows
        assert plan.finished == sorted(plan.finished)
        assert plan.preempted == sorted(plan.preempted)
        self.plans.append(plan)
        self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def land(self):
        plan, result = self.in_flight.popleft()
        if plan.step in self.device.broken:
            updates = self.scheduler.fail_step(plan, RequestFailed("the step failed"))
            self.book(updates, None)
            return updates
        updates = self.scheduler.update(plan, result)
        self.book(updates, result)
        return updates

    def book(self, updates, result: StepResult | None) -> None:
        self.scheduler.check_integrity()
        for update in updates:
            request_id = update.request.request_id
            assert request_id not in self.ended, "an update after the end"
            if update.pooled is not None:
                assert not update.request.yields_tokens
                assert update.finish_reason == "stop"
                self.outputs[request_id] = update.pooled.tolist()
                self.ended[request_id] = "stop"
                continue
            assert len(update.new_token_ids) or update.finish_reason == "error"
            num_rows = update.last_row - update.first_row
            if result is None or result.logprobs is None:
                assert num_rows == 0
            else:
                assert num_rows == len(update.new_token_ids)
                assert update.last_row <= result.logprobs.offsets[-1]
            self.outputs[request_id] += update.new_token_ids
            if update.finish_reason is not None:
                self.ended[request_id] = update.finish_reason

    def tick(self) -> None:
        """What an engine loop does once: keep the pipeline full, else take the oldest result."""
        if (len(self.in_flight) >= self.depth or self.launch() is None) and self.in_flight:
            self.land()

    def drain(self, max_ticks: int = 5_000) -> None:
        """Until everything has ended and nothing is in flight."""
        for _ in range(max_ticks):
            if not self.scheduler.has_unfinished():
                break
            self.tick()
        assert not self.scheduler.has_unfinished(), "not finished in time"
        while self.in_flight:
            self.land()

    def run(self, max_ticks: int = 5_000) -> None:
        """Until everything has ended; then nothing may be left."""
        self.drain(max_ticks)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.stats.kv_usage == 0.0
        assert self.scheduler._kv.host.num_free == self.scheduler._kv.host.num_pages
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.check_integrity()

    def assert_like_reference(self, *request_ids: str) -> None:
        for request_id in request_ids or self.requests:
            request = self.requests[request_id]
            tokens, reason = reference(
                request,
                self.max_model_len,
                self.windows,
                is_recurrent=bool(self.device.checkpoint_pages),
            )
            assert self.outputs[request_id] == tokens, request_id
            assert self.ended[request_id] == reason, request_id


@pytest.fixture(scope="session")
def toy_engine() -> type[ToyEngine]:
    return ToyEngine
