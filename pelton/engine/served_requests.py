"""Requests in the engine's process: from messages to the loop, and from its steps to frames."""

from __future__ import annotations

import itertools
import logging
import time

import numpy as np

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.answers import as_request_failure
from pelton.engine.loop import EngineLoop, Updates
from pelton.engine.siblings import Siblings, children_of
from pelton.errors import PeltonError
from pelton.messages.from_engine import Ended, Fault, First, Outputs, StepStats
from pelton.messages.logprobs import pack_rows
from pelton.messages.pooled import pack_pooled
from pelton.messages.to_engine import Abort, AddRequest, unpack_embeds, unpack_token_ids

_log = logging.getLogger("pelton")

Children = list[Request] | Exception


def read_children(message: AddRequest) -> Children:
    """The requests that a message asks for, one per answer, checked as far as that needs no engine;
    or what is wrong with it. Touches nothing shared: for the input thread."""
    try:
        request = Request(
            # The handle makes it unique, whatever the front end calls its requests.
            f"{message.request_id}/{message.handle}",
            unpack_token_ids(message.token_ids),
            _params_of(message),
            priority=message.priority,
            cache_salt=message.cache_salt,
            eos_token_ids=message.eos_token_ids,
            prompt_embeds=None if message.embeds is None else unpack_embeds(message.embeds),
            second_segment=message.second_segment,
        )
        if request.prompt_embeds is not None:
            _ = request.prompt_embeds.digests  # takes long: not in the step thread
        return children_of(request)
    except Exception as error:
        return error


def _params_of(message: AddRequest) -> SamplingParams | PoolingParams:
    if message.pooling is not None:
        return PoolingParams(**message.pooling)
    return SamplingParams(**message.params)


class ServedRequests:
    """Every answer that was asked for, from its message to its end; then nothing of it is left.

    A fault in one request ends that request: only what `EngineLoop.step` raises is the engine's.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._siblings = Siblings(self._add_if_wanted)
        self._children: dict[int, Request] = {}
        self._handles: dict[str, int] = {}
        self._arrivals: dict[int, float] = {}
        """Of children 0 that have not got anything."""
        self._ended: list[Ended] = []
        self._step = StepStats()

    def __len__(self) -> int:
        """Answers that have not ended."""
        return len(self._children)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._loop.has_work()

    def add(self, message: AddRequest, children: Children) -> None:
        """Queue what `read_children` made of a message."""
        handle = message.handle
        if isinstance(children, Exception):
            count = message.params.get("n", 1)
            self._refuse_all(handle, count if type(count) is int else 1, message, children)
            return
        for index, child in enumerate(children):
            self._children[handle + index] = child
            self._handles[child.request_id] = handle + index
        self._arrivals[handle] = time.monotonic()
        try:
            self._siblings.add(children)
        except Exception as error:
            for index in range(len(children)):
                self._forget(handle + index)
            self._refuse_all(handle, len(children), message, error)

    def abort(self, message: Abort) -> None:
        """End answers that have not ended."""
        handles = range(message.first, message.first + message.count)
        for child in [child for handle in handles if (child := self._forget(handle)) is not None]:
            self._loop.abort(child.request_id)
            self._join_siblings(child)

    def step(self) -> list[Outputs]:
        """Run the loop once; frames to send, in order. Passes on what the loop raises."""
        started = time.monotonic()
        updates = self._loop.step()
        now = time.monotonic()
        frames = []
        # Usually one: a fault can bring the results of several steps at once.
        for _, group in itertools.groupby(updates, key=lambda update: id(update[1])):
            part = list(group)
            num_tokens = sum(len(update.new_token_ids) for update, _ in part)
            self._step = StepStats(len(part), num_tokens, now - started)
            frames.append(self._pack(part))
        return frames

    def news(self) -> Outputs | None:
        """What happened to requests outside of steps, if anything, with the stats of now."""
        return self._pack([]) if self._ended else None

    def current(self) -> Outputs:
        """A frame without tokens: the stats of now."""
        return self._pack([])

    def _add_if_wanted(self, child: Request) -> None:
        if child.request_id in self._handles:
            self._loop.add(child)

    def _join_siblings(self, first: Request) -> None:
        for child, error in self._siblings.join(first):
            handle = self._handles.get(child.request_id)
            if handle is not None:
                self._forget(handle)
                self._ended.append(_refused(handle, error))

    def _refuse_all(self, handle: int, count: int, message: AddRequest, error: Exception) -> None:
        if not isinstance(error, PeltonError):
            _log.error("Request %s failed", message.request_id, exc_info=error)
            error = as_request_failure(message.request_id, error)
        self._ended += [_refused(handle + index, error) for index in range(count)]

    def _forget(self, handle: int) -> Request | None:
        child = self._children.pop(handle, None)
        if child is not None:
            del self._handles[child.request_id]
            self._arrivals.pop(handle, None)
        return child

    def _pack(self, updates: Updates) -> Outputs:
        """updates: of one step, with the same rows."""
        handles: list[int] = []
        counts: list[int] = []
        num_rows: list[int] = []
        ids: list[int] = []
        chosen: list[int] = []
        first: list[First] = []
        ended = self._ended
        self._ended = []
        for update, rows in updates:
            request = update.request
            handle = self._handles.get(request.request_id)
            if handle is None:
                continue
            if handle in self._arrivals:
                first.append(self._first(handle, update))
                self._join_siblings(request)
                ended += self._ended
                self._ended = []
            count = len(update.new_token_ids)
            if count:
                handles.append(handle)
                counts.append(count)
                ids += update.new_token_ids
                num_rows.append(0)
                if rows is not None and request.params.logprobs is not None:
                    chosen += range(update.first_row, update.last_row)
                    num_rows[-1] = count
            if update.finish_reason is not None:
                self._forget(handle)
                ended.append(_ended(handle, update))
        rows = updates[0][1] if chosen else None
        return Outputs(
            handles=np.array(handles, "<i8").tobytes(),
            counts=b"" if len(handles) == sum(counts) else np.array(counts, "<i4").tobytes(),
            token_ids=np.array(ids, "<i4").tobytes(),
            first=first,
            ended=ended,
            scheduler=self._loop.scheduler.stats,
            step=self._step,
            num_rows=np.array(num_rows, "<i4").tobytes() if rows is not None else b"",
            logprobs=None if rows is None else pack_rows(rows, np.array(chosen, np.int32)),
        )

    def _first(self, handle: int, update: RequestUpdate) -> First:
        arrival = self._arrivals.pop(handle)
        request, rows = update.request, update.prompt_logprobs
        return First(
            handle=handle,
            num_cached_tokens=request.num_cached_tokens,
            queue_seconds=max(request.admitted_at - arrival, 0.0),
            prompt_logprobs=None if rows is None else pack_rows(rows, slice(None)),
        )


def _ended(handle: int, update: RequestUpdate) -> Ended:
    reason = update.finish_reason
    assert reason is not None
    assert reason != "abort"
    error = update.error
    if error is not None and not isinstance(error, PeltonError):
        _log.error("Request %s failed", update.request.request_id, exc_info=error)
        error = as_request_failure(update.request.request_id, error)
    return Ended(
        handle=handle,
        reason=reason,
        num_preemptions=update.request.num_preemptions,
        stop_token=update.stop_reason,
        fault=None if error is None else Fault.of(error),
        pooled=None if update.pooled is None else pack_pooled(update.pooled),
    )


def _refused(handle: int, error: Exception) -> Ended:
    return Ended(handle=handle, reason="error", fault=Fault.of(error))
