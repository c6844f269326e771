"""The engine as an asyncio server sees it: requests in, streams of deltas out. No torch.

Text lives here, in the API process: prompts are tokenised, tokens become text, and stop strings are
found; the engine process deals in token ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.core.plan import Int32Array, LogprobRows
from pelton.core.request import Request, check_request
from pelton.core.scheduler import RequestUpdate, SchedulerStats
from pelton.engine.answers import Answer, as_request_failure
from pelton.engine.calls import Asked, Reads
from pelton.engine.client import EngineProcess
from pelton.engine.facts import EngineFacts, facts_of
from pelton.engine.link import EngineLink, Reply
from pelton.engine.outputs import PoolingOutput, PoolingRequestOutput, RequestDelta
from pelton.engine.prompts import Prompt, PromptReader, load_template, load_tokenizer_of
from pelton.engine.replicas import ReplicaProcesses
from pelton.engine.streams import Stream
from pelton.errors import EngineBusy, EngineDead, RequestError, RequestFailed
from pelton.messages.from_engine import CacheReset, Ended, Outputs, StepStats
from pelton.messages.logprobs import unpack_rows
from pelton.messages.pooled import unpack_pooled
from pelton.messages.to_engine import (
    Abort,
    AddRequest,
    ResetPrefixCache,
    pack_embeds,
    pack_params,
    pack_pooling,
    pack_token_ids,
)
from pelton.setup.check import check
from pelton.tokens.chat_template import ChatTemplate
from pelton.tokens.threads import step_back
from pelton.tokens.tokenizer import Tokenizer

_SLICE_SECONDS = 0.004
"""Work on replies that is done before others get their turn on the event loop."""
_LONG_TEXT = 4096
"""Characters. Longer prompts are tokenised beside the event loop: about 1 ms."""

_log = logging.getLogger("pelton")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """scheduler, step: as of the newest reply; the engine sends them with every step, and when a
    request leaves it otherwise. Once it has died nothing runs, waits or is held, and the counts
    stay. num_open: requests that have not ended, or whose consumer has not
    left; num_queued: answers of these for which the engine has no row.
    """

    scheduler: SchedulerStats
    step: StepStats
    num_open: int
    num_queued: int


class AsyncLLM:
    """One engine in a process of its own, or data_parallel_size equal ones as one, shared by any
    number of tasks of one event loop.

    Make one with `start`. Nothing here waits for the engine but `generate`, `reset_prefix_cache`,
    `drain` and `close`.

    Args:
        link: to an engine that is ready.
        max_num_queued_reqs: how many answers may wait for a row before `generate` raises
            EngineBusy; None: any number.

    Attributes:
        config: what everything was resolved to. facts: the same for people.
        tokenizer: None for a model without one. template: renders conversations.
    """

    def __init__(
        self,
        link: EngineLink,
        config: EngineConfig,
        facts: EngineFacts,
        tokenizer: Tokenizer | None,
        template: ChatTemplate,
        *,
        max_num_queued_reqs: int | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.tokenizer = tokenizer
        self.template = template
        self._max_num_queued = max_num_queued_reqs
        self._link = link
        self._reader = PromptReader(config, tokenizer)
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(
            max_workers=2, thread_name_prefix="pelton-text", initializer=step_back
        )
        self._streams: dict[str, Stream] = {}
        self._answers: dict[int, tuple[Stream, Answer]] = {}
        self._silent: set[int] = set()
        """Of the answers, those that have got nothing yet."""
        self._next_handle = 0
        self._backlog: deque[Outputs] = deque()
        self._deliveries = self._deliver_all()
        self._is_scheduled = False
        self._scheduler_stats = SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0, (), 0, 0, 0, 0, 0)
        self._step_stats = StepStats()
        self._resets: deque[asyncio.Future[bool]] = deque()
        self._death: asyncio.Future[EngineDead] = self._loop.create_future()
        self._idle: asyncio.Future[None] | None = None
        self._is_draining = False
        link.listen(self._take, self._note_death)

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        max_num_queued_reqs: int | None = None,
        on_phase: Callable[[str, float], None] | None = None,
    ) -> AsyncLLM:
        """Check the arguments, start the engine's process, and wait until it takes requests.

        on_phase(name, seconds) is called as each start phase ends; nobody waits longer than the
        engine takes, so that a deadline is the caller's (`asyncio.timeout`). Cancelled or failed,
        nothing is left behind.

        Raises ConfigError kin for what cannot work, wherever it is found out; EngineDead, with the
        process's traceback, for everything else.
        """
        started = time.monotonic()
        checked = await asyncio.to_thread(check, args)
        checking = time.monotonic() - started
        kind = EngineProcess if args.data_parallel_size == 1 else ReplicaProcesses
        process = await kind.spawn(checked, on_phase=on_phase)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer_of, checked)
            template = await asyncio.to_thread(load_template, args.chat_template, tokenizer)
            config = await process.ready()
            times = {"check": checking, **process.start_times}
            facts = facts_of(config, checked.checkpoint.name, times)
            link = process if isinstance(process, EngineProcess) else process.link(config)
            return cls(
                link, config, facts, tokenizer, template, max_num_queued_reqs=max_num_queued_reqs
            )
        except BaseException:
            process.kill()
            await asyncio.shield(process.close())
            raise

    @property
    def default_sampling(self) -> Mapping[str, float | int]:
        """What the checkpoint's authors recommend (generation_config.json): arguments of
        SamplingParams, to be overridden by a request's own."""
        return self.config.generation.sampling

    @property
    def is_alive(self) -> bool:
        """Whether the engine works. `died` and open streams may be told a moment later."""
        return self._link.is_running and not self._death.done()

    @property
    def dead_error(self) -> EngineDead | None:
        """Why the engine is not alive, or None."""
        return self._death.result() if self._death.done() else None

    async def died(self) -> EngineDead:
        """Wait until the engine is gone, by fault or by `close`, and say why."""
        return await asyncio.shield(self._death)

    def stats(self) -> EngineStats:
        return EngineStats(
            self._scheduler_stats, self._step_stats, len(self._streams), self._num_queued
        )

    @property
    def _num_queued(self) -> int:
        """What is beyond the engine's rows, or waits there although there are rows (for blocks);
        the stats of that are a step old, and some of it may have left since."""
        beyond = len(self._answers) - self.facts.max_num_seqs
        return max(beyond, min(self._scheduler_stats.num_waiting, len(self._silent)), 0)

    @property
    def max_answers(self) -> int | None:
        """How many answers can be open at once, running and waiting; None: any number."""
        if self._max_num_queued is None:
            return None
        return self.facts.max_num_seqs + self._max_num_queued

    async def generate(
        self,
        prompt: Prompt | Sequence[int] | Int32Array,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Answer a prompt, delta by delta; the last one says `finished`.

        Leaving the iteration in any way (`aclose`, cancellation) ends the request. Deltas that are
        not fetched in time come merged: fetch as slowly as you like.

        Args:
            prompt: as in `LLM.generate`, or bare token ids.
            request_id: unique among open requests; whoever hands ids of others on makes it so.
            priority: lower first, under scheduling_policy="priority".
            cache_salt: requests with different salts share no cached prefix.

        Raises, on the first `anext`: RequestError if the request is wrong, EngineBusy if it is
        turned away. Later: RequestFailed if it fails (all its answers end then), EngineDead if the
        engine does.
        """
        self._check_open()
        request, _ = await self._read(
            self._reader.read, request_id, prompt, params, priority, cache_salt
        )
        stream = self._open(request)
        try:
            while True:
                delta = await stream.next()
                yield delta
                if delta.finished:
                    return
        finally:
            self._close(stream)

    async def pool(
        self,
        prompt: Prompt | Sequence[int] | Int32Array,
        params: PoolingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """What is made of a prompt's hidden states, by an engine that pools. Cancellation ends the
        request. Arguments, and what it raises, are those of `generate`."""
        self._check_open()
        request, text = await self._read(
            self._reader.read_pooled, request_id, prompt, params, priority, cache_salt
        )
        stream = self._open(request)
        try:
            delta = await stream.next()
        finally:
            self._close(stream)
        (answer,) = delta.outputs
        if answer.pooled is None:
            raise RequestFailed(f"Request {request_id!r} was aborted.")
        return PoolingRequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            outputs=PoolingOutput(answer.pooled),
            finished=True,
            num_cached_tokens=delta.num_cached_tokens,
        )

    async def _read(
        self,
        reader: Reads[Asked],
        request_id: str,
        prompt: Prompt | Sequence[int] | Int32Array,
        params: Asked,
        priority: int,
        cache_salt: str | None,
    ) -> tuple[Request, str | None]:
        if priority != 0 and self.config.scheduler.policy != "priority":
            raise RequestError(
                'priority needs an engine with scheduling_policy="priority"; this one serves '
                f"{self.config.scheduler.policy!r}.",
                field="priority",
            )
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        elif not isinstance(prompt, Mapping):
            prompt = {"prompt_token_ids": prompt}
        if cache_salt is not None:
            prompt = {**prompt, "cache_salt": cache_salt}

        def read() -> tuple[Request, str | None]:
            return reader(request_id, prompt, params, priority=priority)

        text = prompt.get("prompt")
        is_long = isinstance(text, str) and len(text) > _LONG_TEXT
        if "prompt_embeds" not in prompt and (not is_long or "prompt_token_ids" in prompt):
            return read()
        return await self._loop.run_in_executor(self._threads, read)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Int32Array:
        """Token ids, made beside the event loop where that takes long. Raises RequestError."""
        tokenizer = self._need_tokenizer()
        if len(text) <= _LONG_TEXT:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._loop.run_in_executor(
            self._threads, lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> dict[str, Any]:
        """A prompt for `generate`, with text and token ids, made beside the event loop: templates
        are foreign code, and take what time they like.

        options: as in `ChatTemplate.render`. Raises RequestError.
        """
        tokenizer = self._need_tokenizer()

        def render() -> dict[str, Any]:
            text = self.template.render(messages, **options)
            return {"prompt": text, "prompt_token_ids": tokenizer.encode_chat(text)}

        return await self._loop.run_in_executor(self._threads, render)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                "this model has no tokenizer, so a prompt must be given as token ids.",
                field="prompt",
            )
        return self.tokenizer

    def _check_open(self) -> None:
        if self._death.done():
            raise _again(self._death.result())
        if self._is_draining:
            raise EngineBusy("The engine is shutting down.")

    def _open(self, request: Request) -> Stream:
        """Hand a request to the engine. Nothing is left behind if that fails."""
        self._check_open()  # once more: reading it took time
        request_id, num_answers = request.request_id, request.params.n
        if request_id in self._streams:
            raise RequestError(
                f"request_id {request_id!r} is in use; choose another one.", field="request_id"
            )
        limit = self._max_num_queued
        num_free = max(self.facts.max_num_seqs - len(self._answers), 0)
        if limit is not None and self._num_queued + num_answers > limit + num_free:
            raise EngineBusy(
                f"{self._num_queued} answers wait for their turn; with max_num_queued_reqs={limit} "
                f"there is no room for {num_answers} more."
            )
        check_request(
            request,
            max_model_len=self.config.max_model_len,
            vocab_size=self.config.model.vocab_size,
        )
        handle, self._next_handle = self._next_handle, self._next_handle + num_answers
        message = AddRequest(
            handle=handle,
            request_id=request_id,
            token_ids=pack_token_ids(request.known_token_ids),
            params={} if request.pooling is not None else pack_params(request.params),
            pooling=None if request.pooling is None else pack_pooling(request.pooling),
            eos_token_ids=request.eos_token_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            embeds=None if request.prompt_embeds is None else pack_embeds(request.prompt_embeds),
            second_segment=request.second_segment,
        )
        stream = Stream(request, handle, self.tokenizer)
        # Known before the engine knows of it: its first reply finds the way.
        self._streams[request_id] = stream
        for answer in stream.answers:
            self._answers[handle + answer.index] = stream, answer
            self._silent.add(handle + answer.index)
        try:
            self._link.send(message)
            request.prompt_embeds = None  # they are the engine's now
        except (TypeError, OverflowError) as error:
            self._close(stream)
            raise RequestError(f"the request holds a value that cannot be sent: {error}.") from None
        except BaseException:
            self._close(stream)
            raise
        return stream

    def _close(self, stream: Stream) -> None:
        """The stream's consumer has left, or never came."""
        self._abort_rest(stream)
        self._streams.pop(stream.request.request_id, None)
        if not self._streams and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _abort_rest(self, stream: Stream) -> list[Answer]:
        """Take the unfinished answers from the engine, and return them."""
        handles = range(stream.handle, stream.handle + len(stream.answers))
        gone = [found[1] for h in handles if (found := self._answers.pop(h, None)) is not None]
        self._silent.difference_update(handles)
        if gone:
            self._link.send(Abort(stream.handle, len(stream.answers)))
        return gone

    async def abort(self, request_id: str) -> None:
        """End a request: its consumer gets what came so far, and finish_reason "abort". One that
        has ended, or is unknown, is passed over."""
        stream = self._streams.get(request_id)
        if stream is not None:
            for answer in self._abort_rest(stream):
                stream.put(answer.abort())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing changed, while requests are running."""
        self._check_open()
        future: asyncio.Future[bool] = self._loop.create_future()
        self._resets.append(future)
        self._link.send(ResetPrefixCache())
        return await future

    async def drain(self, timeout: float) -> bool:
        """Take no more requests, and wait until all are done, at most `timeout` seconds; what is
        left then is aborted. Returns whether all ended by themselves."""
        self._is_draining = True
        if not self._streams:
            return True
        if self._idle is None:
            self._idle = self._loop.create_future()
        ends: list[asyncio.Future[Any]] = [self._idle, self._death]
        await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        left = list(self._streams)
        for request_id in left:
            await self.abort(request_id)
        return not left

    async def close(self) -> None:
        """End the engine; open streams get EngineDead. Returns when its process is gone."""
        self._is_draining = True
        self._note_death(EngineDead("The engine was shut down."))
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._link.close()

    def _note_death(self, error: EngineDead) -> None:
        if self._death.done():
            return
        with suppress(Exception):
            for _ in self._deliveries:
                pass  # what came before its death counts
        self._death.set_result(error)
        self._answers.clear()
        self._silent.clear()
        self._scheduler_stats = replace(
            self._scheduler_stats, num_running=0, num_waiting=0, kv_usage=0.0
        )
        for stream in self._streams.values():
            stream.fail(_again(error))
        while self._resets:
            future = self._resets.popleft()
            if not future.done():
                future.set_exception(_again(error))

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, CacheReset):
            future = self._resets.popleft()
            if not future.done():
                future.set_result(reply.done)
            return
        self._scheduler_stats, self._step_stats = reply.scheduler, reply.step
        self._backlog.append(reply)
        if not self._is_scheduled:
            self._work()

    def _work(self) -> None:
        """Deliver what has arrived, in slices."""
        self._is_scheduled = False
        deadline = time.perf_counter() + _SLICE_SECONDS
        try:
            for _ in self._deliveries:
                if time.perf_counter() > deadline:
                    self._is_scheduled = True
                    self._loop.call_soon(self._work)
                    return
        except Exception as error:
            # `_give` keeps one request's faults from the others, so the frame itself is wrong.
            _log.exception("A frame of the engine was not understood")
            self._note_death(EngineDead(f"The engine sent a wrong frame: {error}."))
        self._deliveries = self._deliver_all()

    def _deliver_all(self) -> Iterator[None]:
        while self._backlog:
            yield from self._deliver(self._backlog.popleft())

    def _deliver(self, outputs: Outputs) -> Iterator[None]:
        """Hand out a frame, answer by answer."""
        handles = np.frombuffer(outputs.handles, "<i8").tolist()
        ids = np.frombuffer(outputs.token_ids, "<i4").tolist()
        counts = np.frombuffer(outputs.counts, "<i4").tolist() or [1] * len(handles)
        num_rows = np.frombuffer(outputs.num_rows, "<i4").tolist() or [0] * len(handles)
        rows = None if outputs.logprobs is None else unpack_rows(outputs.logprobs)
        for first in outputs.first:
            if (found := self._answers.get(first.handle)) is not None:
                found[0].note_first(first)
        ended = {one.handle: one for one in outputs.ended}
        is_legal = not ids or (min(ids) >= 0 and max(ids) < self.config.model.vocab_size)
        start, first_row = 0, 0
        for handle, count, num in zip(handles, counts, num_rows, strict=True):
            end, last_row = start + count, first_row + num
            found = self._answers.get(handle)
            if found is not None:
                new = ids[start:end]
                fault = None
                if not is_legal:
                    fault = self._illegal_id(found[0], new)
                self._give(
                    handle, found, new, rows, (first_row, last_row), ended.pop(handle, None), fault
                )
            else:
                ended.pop(handle, None)
            start, first_row = end, last_row
            yield
        for handle, end_of in ended.items():
            if (found := self._answers.get(handle)) is not None:
                self._give(handle, found, [], None, (0, 0), end_of, None)
                yield

    def _give(
        self,
        handle: int,
        found: tuple[Stream, Answer],
        ids: list[int],
        rows: LogprobRows | None,
        span: tuple[int, int],
        ended: Ended | None,
        fault: Exception | None,
    ) -> None:
        """One answer's part of a frame. Whatever goes wrong is this request's fault alone."""
        stream, answer = found
        self._silent.discard(handle)
        error = None
        if ended is not None:
            stream.note_end(ended)
            error = None if ended.fault is None else ended.fault.as_error()
        update = RequestUpdate(
            stream.request,
            ids,
            span[0],
            span[1],
            None if ended is None else ended.reason,
            stop_reason=None if ended is None else ended.stop_token,
            error=error,
        )
        if ended is not None and ended.pooled is not None:
            update.pooled = unpack_pooled(ended.pooled)
        try:
            if fault is not None:
                raise fault
            delta = answer.take(update, rows)
        except Exception as problem:
            _log.exception("Request %s failed", stream.request.request_id)
            if not isinstance(problem, RequestFailed):
                problem = as_request_failure(stream.request.request_id, problem)
            delta = answer.fail(problem)
        if delta.finish_reason is not None:
            del self._answers[handle]
            if ended is None:
                self._link.send(Abort(handle, 1))
        stream.put(delta)
        if delta.error is not None:
            self._abort_rest(stream)

    def _illegal_id(self, stream: Stream, ids: list[int]) -> RequestFailed | None:
        vocab_size = self.config.model.vocab_size
        for token in ids:
            if not 0 <= token < vocab_size:
                return RequestFailed(
                    f"Request {stream.request.request_id!r} failed: token id {token} is outside "
                    f"[0, {vocab_size})."
                )
        return None


def _again(error: EngineDead) -> EngineDead:
    """A copy, since an exception that many tasks raise would collect all their tracebacks."""
    return EngineDead(str(error), child_traceback=error.child_traceback)
