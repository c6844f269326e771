"""What runs next.

There are no phases: every request has known tokens, may have tokens in flight, and gets some of
its uncomputed ones in each step. Rows are counted by what is scheduled; results arrive later, and
one that belongs to a life that has ended (preempted, aborted) is recognised by its SlotRef and
dropped: its tokens are computed again, and are the same, since the noise is stateless.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import numpy.typing as npt

from pelton.config.cache import CacheConfig
from pelton.config.scheduler import SchedulerConfig
from pelton.core.kv.block_pool import block_ids
from pelton.core.kv.host_pages import HostPages, MoveCosts
from pelton.core.kv.manager import KVManager
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import (
    ALL_MASKED,
    BAD_TOKEN,
    NAN_LOGITS,
    NAN_POOLED,
    OK,
    PROCESSOR_FAILED,
    BlockAppend,
    Float32Array,
    Int32Array,
    LogprobRows,
    NewRow,
    SlotRef,
    StepPlan,
    StepResult,
)
from pelton.core.policy import get_policy, insert, remove
from pelton.core.request import (
    FinishReason,
    Request,
    RequestStatus,
    check_request,
    fields_that_exclude,
)
from pelton.core.stopping import check_stop
from pelton.errors import ConfigError, IntegrityError, PeltonError, RequestError, RequestFailed
from pelton.metrics.step_sizes import StepSizes

_MANY = 2**31
# Decodes that take about as long together as one alone.
_FEW_ROWS = 4
_STATUS_TEXT = {
    NAN_LOGITS: "the model's logits are not finite",
    ALL_MASKED: "no token is legal",
    BAD_TOKEN: "the sampled id is outside the vocabulary",
    PROCESSOR_FAILED: "a logits processor raised an exception; the log has it",
    NAN_POOLED: "the model's hidden states are not finite",
}
_NOT_FINITE = (NAN_LOGITS, NAN_POOLED)


@dataclass(slots=True)
class RequestUpdate:
    """What one step's result changed for one request.

    new_token_ids: [m], delivered exactly once and in order; cut after a stopping token.
    first_row, last_row: half-open range of the m tokens in the step's LogprobRows (empty without).
    finish_reason: set when the request has ended; stop_reason: the stop token id that did it, None
        for an end-of-sequence token; error: why, where the reason is "error".
    prompt_logprobs: with the first token of a request that asked: [prompt_len - 1] rows, of its
        prompt's tokens from the second on.
    pooled: with the end of a request that pools: [D], or for a task of tokens [T, D].
    """

    request: Request
    new_token_ids: list[int]
    first_row: int
    last_row: int
    finish_reason: FinishReason | None
    prompt_logprobs: LogprobRows | None = None
    stop_reason: int | None = None
    error: Exception | None = None
    pooled: Float32Array | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of now, and counts since the start.

    num_running: requests with blocks, the draining ones included. kv_usage: share of the usable
    blocks that requests hold. num_cache_queries / num_cache_hits: tokens looked up on admission,
    and of these, tokens found and used; num_group_matches: tokens that each KV group alone had,
    used or not (where one is far below the rest, it is why the others' are not used).
    num_scheduled_tokens includes drafts and recomputed tokens.
    num_drafts: rows that had drafts to verify; num_draft_tokens: their drafts; num_accepted_tokens:
    those that stood, so that acceptance length is 1 + num_accepted_tokens / num_drafts.
    Of preempted requests' computed tokens, num_saved_tokens went to host memory; when they came
    back, num_restored_tokens were copied from there, and num_recomputed_tokens were neither copied
    nor hit.
    step_sizes: steps by num_scheduled_tokens, see metrics/step_sizes.py.
    """

    num_running: int
    num_waiting: int
    kv_usage: float
    num_steps: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    num_cache_queries: int
    num_cache_hits: int
    num_group_matches: tuple[int, ...]
    num_preemptions: int
    num_errors: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_saved_tokens: int = 0
    num_restored_tokens: int = 0
    num_recomputed_tokens: int = 0
    step_sizes: tuple[int, ...] = ()


class Scheduler:
    """Gives rows, blocks and tokens to requests, and books what comes back.

    Call order: `schedule` any number of times, `update` (or `fail_step`) once per plan, in the
    plans' order; `add`, `abort` and `preempt` at any time in between.

    Args:
        config, cache: limits.
        groups: from `group_layers`.
        max_model_len: prompt and output of a request together, in tokens.
        vocab_size: token ids are in [0, vocab_size).
        num_speculative_tokens: K, most drafts of a decoding row in each step.
        move_costs: decide which preempted requests' KV goes to host pages, if there are any.

    Raises ConfigError for limits that cannot work.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        groups: Sequence[KVGroup],
        *,
        max_model_len: int,
        vocab_size: int,
        num_speculative_tokens: int = 0,
        move_costs: MoveCosts | None = None,
    ) -> None:
        for name, value, least in (
            ("max_num_seqs", config.max_num_seqs, 1),
            ("max_num_batched_tokens", config.max_num_batched_tokens, 1),
            ("long_prefill_token_threshold", config.long_prefill_token_threshold, 0),
            ("max_scored_tokens", config.max_scored_tokens, 1),
            ("max_model_len", max_model_len, 2),
            ("vocab_size", vocab_size, 1),
            ("num_speculative_tokens", num_speculative_tokens, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
        longest = config.long_prefill_token_threshold or config.max_num_batched_tokens
        if not config.chunks_prompts and longest < max_model_len:
            raise ConfigError(
                f"A step takes {longest} tokens of a prompt at most, and prompts of up to "
                f"max_model_len={max_model_len} tokens that must be computed whole."
            )
        self._policy_key = get_policy(config.policy)
        self._is_fcfs = config.policy == "fcfs"
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._long_prefill = longest
        self._max_scored = config.max_scored_tokens
        self._max_num_seqs = config.max_num_seqs
        self._chunks_prompts = config.chunks_prompts
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._num_drafts = num_speculative_tokens
        self._num_stages = config.num_stages
        self._has_plain_rows = not num_speculative_tokens and config.num_stages == 1
        self._kv = KVManager(
            groups,
            cache.num_blocks,
            enable_prefix_caching=cache.enable_prefix_caching,
            host=HostPages(cache.num_host_pages, move_costs or MoveCosts()),
        )
        # The last token of a sequence needs no KV. With this limit a request that is alone always
        # gets the blocks that it wants: it ends with "length" before it outgrows the pool.
        self._max_len = min(max_model_len, self._kv.max_tokens() + 1)

        self._requests: dict[str, Request] = {}
        self._by_ref: dict[SlotRef, Request] = {}
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._num_arrivals = 0

        self._free_slots = list(reversed(range(self._max_num_seqs)))
        self._generations = [0] * self._max_num_seqs
        self._finished_refs: list[SlotRef] = []
        self._preempted_refs: list[SlotRef] = []

        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        """Launched plans, and whose rows they have."""
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._step_sizes = StepSizes()
        self._num_generated_tokens = 0
        self._num_cache_queries = 0
        self._num_cache_hits = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self._num_errors = 0
        self._num_draft_rows = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, with nothing changed, if it can never run.

        The numbers behind its arrival are kept for its siblings (params.n > 1), so that they stand
        where it stood, however many have come since.
        """
        self._validate(request)
        max_tokens = request.params.max_tokens
        request.max_total_len = self._max_len
        if not request.yields_tokens:
            request.max_total_len = request.prompt_len
        elif max_tokens is not None:
            request.max_total_len = min(self._max_len, request.prompt_len + max_tokens)
        if request.arrival < 0:
            request.arrival = self._num_arrivals
            self._num_arrivals += request.params.n
        request.key = (self._policy_key(request), request.arrival)
        self._requests[request.request_id] = request
        insert(self._waiting, request)

    def _validate(self, request: Request) -> None:
        length = request.prompt_len
        if request.request_id in self._requests:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; choose another one.",
                field="request_id",
            )
        check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        needed = self._kv.num_blocks_for(length)  # one output token more needs no KV
        if needed > self._kv.num_usable:
            raise RequestError(
                f"The prompt's {length} tokens need {needed} KV blocks; the cache has "
                f"{self._kv.num_usable} usable ones. Shorten it or enlarge the KV cache.",
                field="prompt_token_ids",
            )

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; False if it is unknown or has ended already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, "abort")
        return True

    def preempt(self, request_id: str) -> bool:
        """Send a running request back to the queue; False if it is not running, or needs no further
        step."""
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return False
        self._preempt(request)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, with nothing changed, while any block is in use."""
        if not self._kv.reset_prefix_cache():
            return False
        for request in self._waiting:
            self._kv.forget_saved(request)
        return True

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    def fills_a_step(self) -> bool:
        """Whether those that wait leave nothing of the next step to requests yet to come, which
        stand behind them. If it turns out that much is in the prefix cache, something is left."""
        rows, tokens = len(self._free_slots), self._max_num_batched_tokens
        if self._is_fcfs:
            for request in self._waiting:
                tokens -= min(request.num_tokens, self._long_prefill)
                rows -= 1
                if tokens <= 0 or rows <= 0:
                    return True
        return False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks: those with a row, and those that only await their tokens."""
        return len(self._requests) - len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans whose result has not come."""
        return len(self._in_flight)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            kv_usage=self._kv.num_used / self._kv.num_usable,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_cache_queries=self._num_cache_queries,
            num_cache_hits=self._num_cache_hits,
            num_group_matches=tuple(self._kv.group_matches),
            num_preemptions=self._num_preemptions,
            num_errors=self._num_errors,
            num_drafts=self._num_draft_rows,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_saved_tokens=self._kv.host.num_saved_tokens,
            num_restored_tokens=self._kv.host.num_restored_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            step_sizes=self._step_sizes.counts,
        )

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can run now (then nothing is unfinished, or results
        are in flight)."""
        draft = _Draft(self._max_num_batched_tokens)
        if not self._schedule_running(draft):
            self._schedule_waiting(draft)
        if not draft.requests:
            return None
        state_saves = self._kv.checkpoint(draft.requests)
        plan = draft.to_plan(self._num_steps, self._finished_refs, self._preempted_refs)
        if self._num_stages > 1:
            plan.known_tokens = _known_tokens(draft.requests, plan.num_computed_bound)
        plan.state_saves = state_saves
        plan.offloads = self._kv.host.take_orders()
        self._finished_refs, self._preempted_refs = [], []
        self._num_steps += 1
        num_tokens = self._max_num_batched_tokens - draft.budget
        self._num_scheduled_tokens += num_tokens
        self._step_sizes.add(num_tokens)
        self._in_flight.append((plan, draft.requests))
        for request in draft.drained:
            self._drain(request)
        return plan

    def _schedule_running(self, draft: _Draft) -> bool:
        """Serve the running requests, best first; whether anyone was preempted.

        Who must yield is the last of the list, so nobody who was served in this step ever has to.
        """
        running = self._running
        preempted = False
        index = 0
        rows_left = self._rows_of_a_step()
        while index < len(running) and draft.budget > 0:
            if self._has_plain_rows:
                index += draft.give_plain(running, index)
                if index == len(running) or draft.budget == 0:
                    break
            request = running[index]
            computed = request.num_computed_tokens
            if self._num_stages > 1 and computed >= request.prefill_len:
                if request.num_in_flight_min or not rows_left:
                    index += 1
                    continue
                rows_left -= 1
            want = request.num_tokens + request.num_placeholders - computed
            if computed < request.prefill_len:
                num_drafts = 0
                count = self._chunk(request, want, draft)
                samples = count == want and request.yields_tokens
            else:
                # Here one token is wanted, and drafts. The last possible token needs no KV, so no
                # position from there on is of use. What is computed is an upper bound while drafts
                # are in flight, so a row may have to wait here for their result.
                room = self._max_len - 1 - computed
                count = want + request.num_useful_drafts if self._num_drafts else want
                if count > room or count > draft.budget:
                    count = min(room, draft.budget)
                if count <= 0:
                    index += 1
                    continue
                num_drafts = count - want
                samples = True
            end = computed + count
            if end > request.block_capacity:
                appends = self._kv.grow(request, end)
                while appends is None and self._make_room(request, index, len(draft.drained)):
                    preempted = True
                    appends = self._kv.grow(request, end)
                if appends is None:
                    if request.status is not RequestStatus.RUNNING:
                        preempted = True
                    else:
                        index += 1
                    continue
                draft.block_appends += appends
            draft.give(request, count, num_drafts, samples=samples)
            index += 1
        return preempted

    def _rows_of_a_step(self) -> int:
        """Rows that may decode in one step of a pipeline: a stage's share of all, but no fewer than
        cost about what one does."""
        return max(-(-len(self._running) // self._num_stages), _FEW_ROWS)

    def _chunk(self, request: Request, want: int, draft: _Draft) -> int:
        """How many of the `want` known tokens that a request has not computed it may have now."""
        count = min(want, self._long_prefill, draft.budget)
        if request.awaited_prompt_logprobs is not None:
            if draft.room_to_score is None:
                draft.room_to_score = self._room_to_score()
            # One at least, so that it never stands in the way of those behind it.
            count = min(count, max(draft.room_to_score, 1))
            draft.room_to_score -= count
        return self._kv.chunk(request, count)

    def _room_to_score(self) -> int:
        """Prompt tokens of a step that may have log-probabilities: few where anybody waits for the
        step's token."""
        answers_are_under_way = any(
            request.num_computed_tokens >= request.prefill_len and not request.is_drained
            for request in self._running
        )
        return self._max_scored if answers_are_under_way else self._max_num_batched_tokens

    def _make_room(self, request: Request, index: int, num_drained: int) -> bool:
        """Preempt the worst running request; False if `request` itself must do without for now."""
        victim = self._running[-1]
        if victim is not request:
            self._preempt(victim)
            return True
        if index > num_drained:
            self._preempt(request)
            return False
        # Everyone else only waits for tokens in flight, and will leave blocks behind soon.
        if num_drained == 0 and self.num_running == 1:
            raise IntegrityError(f"{request} is alone and cannot get its blocks.")
        return False

    def _schedule_waiting(self, draft: _Draft) -> None:
        """Admit waiting requests, best first, until one does not fit."""
        while self._waiting and self._free_slots and draft.budget > 0:
            request = self._waiting[0]
            if not self._chunks_prompts and request.num_tokens > draft.budget:
                return
            admission = self._kv.admit(request)
            if admission is None:
                return
            del self._waiting[0]
            num_computed = request.num_computed_tokens
            request.status = RequestStatus.RUNNING
            request.prefill_len = request.num_tokens
            if not request.num_preemptions:
                request.admitted_at = time.monotonic()
            self._num_recomputed_tokens += max(request.num_confirmed_tokens - num_computed, 0)
            request.num_confirmed_tokens = num_computed
            request.num_drafts_expected = self._num_drafts
            if request.num_preemptions == 0:
                request.num_cached_tokens = admission.num_hits
            self._num_cache_queries += request.num_tokens
            self._num_cache_hits += admission.num_hits
            slot = self._free_slots.pop()
            self._generations[slot] += 1
            request.ref = SlotRef(slot, self._generations[slot])
            self._by_ref[request.ref] = request
            insert(self._running, request)
            draft.new_rows.append(
                NewRow(
                    ref=request.ref,
                    request_id=request.request_id,
                    token_ids=request.known_token_ids,
                    prompt_len=request.prompt_len,
                    num_computed_tokens=num_computed,
                    block_ids=tuple(block_ids(table) for table in request.blocks),
                    params=request.params,
                    pooling=request.pooling,
                    second_segment=request.second_segment,
                    seed=request.seed,
                    eos_token_ids=request.eos_token_ids,
                    state_blocks=admission.state_blocks,
                    restores=admission.restores,
                    prompt_embeds=(
                        request.prompt_embeds if num_computed < request.embeds_end else None
                    ),
                )
            )
            want = request.num_tokens - num_computed
            count = self._chunk(request, want, draft)
            draft.give(request, count, 0, samples=count == want and request.yields_tokens)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Book the result of the oldest plan in flight.

        A row that failed, has a status other than OK, or holds ids that cannot be, ends its request
        with "error" and nobody else's. Raises IntegrityError for a result out of turn.
        """
        if result.step != plan.step:
            raise IntegrityError(f"Step {plan.step} was given the result of step {result.step}.")
        requests = self._take_from_flight(plan)
        updates = []
        num_plain = 0
        rows = _Rows(plan, result, self._is_faulty(plan, result))
        # A copy: the worker may write its next result where this one stands.
        all_ids = result.token_ids.tolist()
        counts = plan.num_scheduled_tokens.tolist()
        for row, (request, ref, count, token_ids, may_be_plain) in enumerate(
            zip(requests, plan.refs, counts, all_ids, self._may_be_plain(rows), strict=True)
        ):
            if request.ref != ref:
                continue  # that life of the request is over
            num_tokens = request.num_tokens
            num_confirmed = request.num_confirmed_tokens + count
            if (
                may_be_plain
                and num_confirmed < request.next_settle_length
                and num_tokens + 1 < request.max_total_len
                and num_tokens < len(request.token_ids)
                and token_ids[0] not in request.end_token_ids
                and request.awaited_prompt_logprobs is None
            ):
                # What `_book` does with a token that ends nothing, as nearly all of them do.
                request.num_confirmed_tokens = num_confirmed
                request.num_placeholders -= 1
                request.num_in_flight_min -= 1
                request.token_ids[num_tokens] = token_ids[0]
                request.num_tokens = num_tokens + 1
                num_plain += 1
                updates.append(RequestUpdate(request, token_ids, 0, 0, None))
            elif (update := self._book(request, rows, row, token_ids)) is not None:
                updates.append(update)
        self._num_generated_tokens += num_plain
        self._release_restored(plan)
        return updates

    def _may_be_plain(self, rows: _Rows) -> list[bool]:
        """[B], rows that yield one good token and nothing beside."""
        plan, result = rows.plan, rows.result
        if self._num_drafts or result.failed or result.logprobs is not None:
            return [False] * plan.num_rows
        is_plain: list[bool] = (plan.samples & ~rows.is_faulty).tolist()
        return is_plain

    def _book(
        self, request: Request, rows: _Rows, row: int, token_ids: list[int]
    ) -> RequestUpdate | None:
        """One row of a step's result, whatever it is. token_ids: [1 + K]."""
        plan, result = rows.plan, rows.result
        ref = plan.refs[row]
        if ref in result.failed:
            return self._fail(request, result.failed[ref])
        if rows.is_faulty[row]:
            return self._fail(request, self._fault(request, result, row))
        request.num_confirmed_tokens += int(plan.num_scheduled_tokens[row])
        awaited = request.awaited_prompt_logprobs
        if awaited is not None and result.prompt_logprobs is not None:
            awaited.add(plan.num_computed_bound[row] + 1, result.prompt_logprobs, row)
        if request.awaited_pooled is not None:
            return self._book_pooled(request, int(plan.num_computed_bound[row]), result, row)
        if not plan.samples[row]:
            if request.num_confirmed_tokens >= request.next_settle_length:
                self._kv.settle(request, request.num_confirmed_tokens)
            return None
        num_drafts, num_sampled = rows.num_drafts[row], rows.num_sampled[row]
        num_rejected = 1 + num_drafts - num_sampled
        # Only a forecast of what to verify, so that no value can do harm.
        request.num_drafts_expected = min(max(rows.num_proposed[row], 0), self._num_drafts)
        if num_drafts:
            self._num_draft_rows += 1
            self._num_draft_tokens += num_drafts
            self._num_accepted_tokens += num_sampled - 1
        request.num_placeholders -= 1 + num_drafts
        request.num_in_flight_min -= 1
        request.num_computed_tokens -= num_rejected
        request.num_confirmed_tokens -= num_rejected
        num_new = self._append(request, token_ids[:num_sampled])
        del token_ids[num_new:]
        first_row = last_row = 0
        if result.logprobs is not None:
            first_row = int(result.logprobs.offsets[row])
            last_row = first_row + num_new
        update = RequestUpdate(
            request,
            token_ids,
            first_row,
            last_row,
            request.finish_reason,
            stop_reason=request.stop_reason,
        )
        if awaited is not None:
            update.prompt_logprobs = awaited.joined()
            request.awaited_prompt_logprobs = None
        return update

    def _book_pooled(
        self, request: Request, position: int, result: StepResult, row: int
    ) -> RequestUpdate | None:
        """What a step made of a pooling request's tokens from `position` on."""
        awaited = request.awaited_pooled
        assert awaited is not None
        values = result.pooled.get(row)
        if values is not None:
            awaited.add(position, values)
        if request.num_confirmed_tokens >= request.next_settle_length:
            self._kv.settle(request, request.num_confirmed_tokens)
        if request.num_confirmed_tokens < request.prompt_len:
            return None
        pooled = awaited.joined()
        self._finish(request, "stop")
        return RequestUpdate(request, [], 0, 0, "stop", pooled=pooled)

    def _release_restored(self, plan: StepPlan) -> None:
        """The plan's step has ended: what was to be restored in it is where it should be."""
        for row in plan.new_rows:
            request = self._by_ref.get(row.ref)
            if request is not None:
                self._kv.forget_saved(request)

    def _append(self, request: Request, ids: list[int]) -> int:
        """Append a row's tokens up to one that stops the request; how many that were."""
        before = request.num_tokens
        stop = None
        for token in ids:
            request.append(token)
            # Nearly every token of a batch ends nothing: this spares it a call.
            if token in request.end_token_ids or request.num_tokens >= request.max_total_len:
                stop = check_stop(request, token)
                if stop is not None:
                    break
        num_new = request.num_tokens - before
        self._num_generated_tokens += num_new
        # Tokens cut off behind a stop have KV, but are not known tokens of this request.
        confirmed = min(request.num_confirmed_tokens, request.num_tokens)
        if confirmed >= request.next_settle_length:
            self._kv.settle(request, confirmed)
        if stop is not None:
            request.stop_reason = stop.token
            self._finish(request, stop.reason)
        elif num_new > 1 and request.status is RequestStatus.RUNNING and request.is_drained:
            self._drain(request)  # accepted drafts have brought the end within reach
        return num_new

    def _is_faulty(self, plan: StepPlan, result: StepResult) -> npt.NDArray[np.bool_]:
        """[B], rows with a bad status, a number of tokens that cannot be, or an id that cannot be.

        A sampling row yields at least one token, and at most one more than its drafts.
        """
        ids, num_sampled = result.token_ids, result.num_sampled
        # Mostly every row yields one good token, and one look says so: as unsigned numbers, ids
        # below 0 are large ones.
        if (
            ids.shape[1] == 1
            and not result.status.any()
            and (num_sampled == plan.samples).all()
            and ids.size
            and ids.astype(np.uint32).max() < self._vocab_size
        ):
            return np.zeros(len(ids), np.bool_)
        most = np.where(plan.samples, 1 + plan.num_drafts, 0)
        is_valid = np.arange(ids.shape[1]) < num_sampled[:, None]
        is_outside = (ids < 0) | (ids >= self._vocab_size)
        faulty: npt.NDArray[np.bool_] = (
            (result.status != OK)
            | (num_sampled < plan.samples)
            | (num_sampled > most)
            | (is_valid & is_outside).any(axis=1)
        )
        return faulty

    def _fault(self, request: Request, result: StepResult, row: int) -> PeltonError:
        """What ends a request whose row is faulty: the user's fault if its own fields leave no
        token or its embeddings no finite number, else the model's or ours."""
        text = f"Request {request.request_id!r} failed: {self._describe_fault(result, row)}"
        fields = fields_that_exclude(request)
        if request.prompt_embeds is not None and result.status[row] in _NOT_FINITE:
            # Ids give finite numbers in every sound model; of embeddings nobody knows until here.
            return RequestError(
                f"prompt_embeds have numbers that are too large for this model: with them "
                f"{self._describe_fault(result, row)}.",
                field="prompt_embeds",
            )
        if result.status[row] != ALL_MASKED or not fields:
            return RequestFailed(f"{text}.")
        return RequestError(
            f"{text} as token {request.num_output_tokens + 1} of the answer: "
            f"{' and '.join(fields)} rule out every one.",
            field=fields[0],
        )

    def _describe_fault(self, result: StepResult, row: int) -> str:
        status, num_sampled = int(result.status[row]), int(result.num_sampled[row])
        if status != OK:
            return _STATUS_TEXT.get(status, f"unknown status {status}")
        for token in result.token_ids[row, :num_sampled].tolist():
            if not 0 <= token < self._vocab_size:
                return f"token id {token} is outside [0, {self._vocab_size})"
        return f"the worker returned {num_sampled} tokens for it, which cannot be"

    def fail_step(self, plan: StepPlan, fault: Exception) -> list[RequestUpdate]:
        """The oldest plan in flight could not be run: end every request in it with "error".

        Nobody knows which copies to and from host pages it has made. So none of the pages are
        trusted, nor is a row that was restored from them in a step that has not ended.
        """
        requests = self._take_from_flight(plan)
        updates = [
            self._fail(request, fault)
            for request, ref in zip(requests, plan.refs, strict=True)
            if request.ref == ref
        ]
        for request in list(self._requests.values()):
            if request.saved is not None:
                self._kv.forget_saved(request)
                if request.status is not RequestStatus.WAITING:
                    self._preempt(request, is_trusted=False)
        return updates

    def _take_from_flight(self, plan: StepPlan) -> list[Request]:
        """Whose rows the plan has."""
        if not self._in_flight or self._in_flight[0][0].step != plan.step:
            steps = [launched.step for launched, _ in self._in_flight]
            raise IntegrityError(f"The result of step {plan.step} is out of turn; due are {steps}.")
        return self._in_flight.popleft()[1]

    def _fail(self, request: Request, fault: Exception) -> RequestUpdate:
        request.error = fault
        self._num_errors += 1
        self._finish(request, "error")
        return RequestUpdate(request, [], 0, 0, "error", error=fault)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.WAITING:
            remove(self._waiting, request)
        elif request.status is RequestStatus.RUNNING:
            remove(self._running, request)
            self._finished_refs.append(self._give_slot_back(request))
        if request.ref is not None:
            del self._by_ref[request.ref]
            request.ref = None
        if reason == "error":
            self._kv.release_distrusted(request)
        else:
            self._kv.release(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _drain(self, request: Request) -> None:
        """All its tokens are in flight: the row is free for the next step, the blocks once the
        result has shown which of them can be cached."""
        remove(self._running, request)
        self._finished_refs.append(self._give_slot_back(request))
        request.status = RequestStatus.DRAINING

    def _preempt(self, request: Request, *, is_trusted: bool = True) -> None:
        """Back to the queue, in its old place. Its cached blocks can be hit when it returns, and
        what was saved of it is restored; nothing is saved of one that is not trusted."""
        if request.status is RequestStatus.RUNNING:
            remove(self._running, request)
            self._preempted_refs.append(self._give_slot_back(request))
        assert request.ref is not None
        del self._by_ref[request.ref]
        request.ref = None
        if is_trusted:
            self._kv.preempt(request)
        else:
            self._kv.release(request)
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.num_in_flight_min = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        request.status = RequestStatus.WAITING
        insert(self._waiting, request)

    def _give_slot_back(self, request: Request) -> SlotRef:
        assert request.ref is not None
        self._free_slots.append(request.ref.slot)
        return request.ref

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queues, rows, counts and blocks agree. Reads everything, so
        it is for tests and idle moments."""
        live = [r for r in self._requests.values() if r.status is not RequestStatus.WAITING]
        running = [r for r in live if r.status is RequestStatus.RUNNING]
        _check(len(live) + len(self._waiting) == len(self._requests), "a request is in no queue")
        _check(sorted(running, key=lambda r: r.key) == self._running, "the running list is wrong")
        _check(
            sorted(self._waiting, key=lambda r: r.key) == self._waiting,
            "the waiting list is not in order",
        )
        for request in self._waiting:
            _check(request.ref is None and not request.blocks, f"{request} waits and holds")
        _check(
            {r.ref: r for r in live} == self._by_ref and len(self._by_ref) == len(live),
            "rows and requests differ",
        )
        slots = sorted([*self._free_slots, *(r.ref.slot for r in running if r.ref is not None)])
        _check(slots == list(range(self._max_num_seqs)), f"slots are lost or doubled: {slots}")
        for request in live:
            self._check_counts(request)
        self._kv.check(list(self._requests.values()))

    def _check_counts(self, request: Request) -> None:
        """The counts of a live request equal those of its rows in flight."""
        num_tokens = num_placeholders = num_steps = 0
        for plan, _ in self._in_flight:
            for row, ref in enumerate(plan.refs):
                if ref == request.ref:
                    num_tokens += int(plan.num_scheduled_tokens[row])
                    if plan.samples[row]:
                        num_placeholders += 1 + int(plan.num_drafts[row])
                        num_steps += 1
        _check(
            request.num_computed_tokens - request.num_confirmed_tokens == num_tokens
            and request.num_placeholders == num_placeholders
            and request.num_in_flight_min == num_steps,
            f"{request} counts other tokens in flight than there are",
        )
        if not request.yields_tokens:
            _check(request.num_confirmed_tokens < request.prompt_len, f"{request} is past its end")
            return
        _check(
            request.num_confirmed_tokens < request.num_tokens < request.max_total_len,
            f"{request} is past its end",
        )


@dataclass
class _Rows:
    """A step, with those of its numbers as lists that only few rows need, if any: made when the
    first one asks, since lists are read several times quicker than arrays.

    is_faulty: [B].
    """

    plan: StepPlan
    result: StepResult
    is_faulty: npt.NDArray[np.bool_]

    @cached_property
    def num_drafts(self) -> list[int]:
        drafts: list[int] = self.plan.num_drafts.tolist()
        return drafts

    @cached_property
    def num_sampled(self) -> list[int]:
        counts: list[int] = self.result.num_sampled.tolist()
        return counts

    @cached_property
    def num_proposed(self) -> list[int]:
        """Where nobody counts them, more than there can be."""
        if self.result.num_proposed is None:
            return [_MANY] * self.plan.num_rows
        counts: list[int] = self.result.num_proposed.tolist()
        return counts


class _Draft:
    """A step while it is put together."""

    __slots__ = (
        "block_appends",
        "bounds",
        "bounds_are_exact",
        "budget",
        "drained",
        "has_embeds",
        "new_rows",
        "requests",
        "room_to_score",
        "unlike",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.bounds: list[int] = []
        """Tokens of each request that were computed before."""
        self.unlike: list[tuple[int, int, int, bool]] = []
        """Row, query tokens, drafts among them and whether it samples, of rows that are not just
        given one token that does."""
        self.bounds_are_exact = True
        self.has_embeds = False
        self.new_rows: list[NewRow] = []
        self.block_appends: list[BlockAppend] = []
        self.drained: list[Request] = []
        self.room_to_score: int | None = None
        """Prompt tokens that may still have log-probabilities; None until somebody asks."""

    def give(self, request: Request, count: int, num_drafts: int, *, samples: bool) -> None:
        """Schedule `count` tokens of a request; its counts advance as if all drafts will hold."""
        if count > 1 or not samples:
            self.unlike.append((len(self.requests), count, num_drafts, samples))
        self.requests.append(request)
        self.bounds.append(request.num_computed_tokens)
        if request.has_drafts_in_flight:
            self.bounds_are_exact = False
        if request.num_computed_tokens < request.embeds_end:
            self.has_embeds = True
        self.budget -= count
        request.num_computed_tokens += count
        if samples:
            request.num_placeholders += 1 + num_drafts
            request.num_in_flight_min += 1
            if request.is_drained:
                self.drained.append(request)
        elif not request.yields_tokens and request.num_computed_tokens == request.prompt_len:
            self.drained.append(request)

    def give_plain(self, running: list[Request], first: int) -> int:
        """Schedule one token of each request from `first` on, up to one that asks for more thought:
        it is in its prompt, needs a block, or comes near its end. How many there were.

        Nothing else can happen to them without a speculator: `give` would do the same. This is
        where nearly all rows of nearly all steps go, so it does without calls.
        """
        requests, bounds = self.requests, self.bounds
        before = len(requests)
        for request in islice(running, first, first + self.budget):
            computed = request.num_computed_tokens
            if not (
                request.prefill_len <= computed < request.block_capacity
                and computed + 2 < request.max_total_len
            ):
                break
            requests.append(request)
            bounds.append(computed)
            request.num_computed_tokens = computed + 1
            request.num_placeholders += 1
            request.num_in_flight_min += 1
        num_plain = len(requests) - before
        self.budget -= num_plain
        return num_plain

    def to_plan(self, step: int, finished: list[SlotRef], preempted: list[SlotRef]) -> StepPlan:
        refs = [request.ref for request in self.requests if request.ref is not None]
        bounds = np.array(self.bounds, np.int32)
        counts = np.ones(len(refs), np.int32)
        num_drafts = np.zeros(len(refs), np.int32)
        samples = np.ones(len(refs), np.bool_)
        if self.unlike:
            rows, counts_of, drafts_of, samples_of = zip(*self.unlike, strict=True)
            at = np.array(rows)
            counts[at], num_drafts[at], samples[at] = counts_of, drafts_of, samples_of
            if (counts[1:] < counts[:-1]).any():
                order = np.argsort(counts, kind="stable")
                refs = [refs[i] for i in order.tolist()]
                self.requests = [self.requests[i] for i in order.tolist()]
                counts, num_drafts = counts[order], num_drafts[order]
                bounds, samples = bounds[order], samples[order]
        return StepPlan(
            step=step,
            refs=refs,
            num_scheduled_tokens=counts,
            num_drafts=num_drafts,
            num_computed_bound=bounds,
            samples=samples,
            bounds_are_exact=self.bounds_are_exact,
            is_one_each=not self.unlike,
            has_embeds=self.has_embeds,
            new_rows=self.new_rows,
            block_appends=self.block_appends,
            finished=sorted(finished),
            preempted=sorted(preempted),
        )


def _known_tokens(requests: list[Request], bounds: Int32Array) -> Int32Array:
    """[B], as StepPlan has it."""
    return np.array(
        [
            request.token_ids[bound] if bound >= request.prefill_len else -1
            for request, bound in zip(requests, bounds.tolist(), strict=True)
        ],
        np.int32,
    )


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise IntegrityError(f"Scheduler: {text}.")
