"""Serving one model, without HTTP: from a request's body to its chunks or its whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from pelton.config.params import MAX_N, SamplingParams
from pelton.engine.outputs import RequestDelta
from pelton.engine.prompts import Prompt
from pelton.errors import RequestError
from pelton.server.errors import ApiError, unavailable
from pelton.server.prompts import PromptReader, ReadyPrompt
from pelton.server.protocol import (
    ChatBody,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionBody,
    GenerationBody,
    refuse_unsupported,
)
from pelton.server.sampling import chat_params, completion_params
from pelton.server.streaming import (
    ChatChunker,
    ChatJoiner,
    Chunker,
    CompletionChunker,
    CompletionJoiner,
    Head,
    Joiner,
)

Chunk = TypeVar("Chunk", bound=msgspec.Struct)
Whole = TypeVar("Whole", bound=msgspec.Struct)


class Engine(Protocol):
    """What is asked of an `AsyncLLM`."""

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestDelta, None]: ...


class Watch:
    """Is told what happens to a request. This one does not care."""

    def begin(
        self, request_id: str, prompts: Sequence[ReadyPrompt], params: SamplingParams
    ) -> None:
        """It goes to the engine under `request_id`."""

    def take(self, prompt: int, delta: RequestDelta) -> None:
        """Answers to prompt number `prompt` got something."""

    def end(self, error: BaseException | None) -> None:
        """All answers have ended, or it failed or was given up; once for each that began."""


class Service:
    """Generation with one model.

    Args:
        engine: runs it.
        reader: makes prompts.
        names: that requests may call the model by, the first one in answers.
        defaults: of sampling fields that requests leave out.
        max_logprobs: most alternatives to a token.
        max_answers: that the engine takes at once, running and waiting; None: any number.
        generates: whether it yields tokens at all.
    """

    def __init__(
        self,
        engine: Engine,
        reader: PromptReader,
        *,
        names: Sequence[str],
        defaults: Mapping[str, Any],
        max_logprobs: int,
        max_answers: int | None = None,
        generates: bool = True,
    ) -> None:
        self._engine = engine
        self._generates = generates
        self._max_answers = max_answers
        self._reader = reader
        self._names = names
        self._defaults = defaults
        self._max_logprobs = max_logprobs

    async def complete(self, body: CompletionBody, watch: Watch) -> Run[Completion, Completion]:
        """Raises RequestError or ApiError for what is wrong with the body."""
        self._check(body)
        params = completion_params(body, self._defaults)
        prompts = await self._reader.completion(body)
        self._check_answers(params.n, len(prompts))
        head = self._head("cmpl")
        chunker = CompletionChunker(head, body, prompts, self._reader.tokenizer)
        streams = self._streams(head.id, prompts, params, body)
        watch.begin(head.id, prompts, params)
        return Run(streams, chunker, CompletionJoiner(), watch)

    async def chat(self, body: ChatBody, watch: Watch) -> Run[ChatChunk, ChatCompletion]:
        """As `complete`, for a conversation."""
        self._check(body)
        params = chat_params(body, self._defaults, max_logprobs=self._max_logprobs)
        self._check_answers(params.n, 1)
        prompt = await self._reader.chat(body)
        head = self._head("chatcmpl")
        chunker = ChatChunker(head, body, prompt, self._reader.tokenizer)
        streams = self._streams(head.id, [prompt], params, body)
        watch.begin(head.id, [prompt], params)
        return Run(streams, chunker, ChatJoiner(), watch)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError, 404, for a name that is not served here; None means: the one here."""
        if name is not None and name not in self._names:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; there is "
                f"{', '.join(map(repr, self._names))}.",
                param="model",
                code="model_not_found",
            )

    def _check(self, body: GenerationBody) -> None:
        self.check_model(body.model)
        if not self._generates:
            raise ApiError(
                400,
                "This server pools, and generates nothing: it answers at /v1/embeddings, /pooling, "
                "/classify, /score and /rerank.",
            )
        refuse_unsupported(body)

    def _check_answers(self, n: int, num_prompts: int) -> None:
        """What could never be taken is no matter of coming again later."""
        if n * num_prompts > MAX_N:
            raise RequestError(
                f"n must be at most {MAX_N // num_prompts} for {num_prompts} prompts, since a "
                f"request may have {MAX_N} answers; got {n}.",
                field="n",
            )
        most = self._max_answers
        if most is not None and n * num_prompts > most:
            raise RequestError(
                f"{num_prompts} prompts with n={n} make {n * num_prompts} answers; this server "
                f"takes {most} at once (max_num_seqs and max_num_queued_reqs).",
                field="n" if n > 1 else "prompt",
            )

    def _head(self, kind: str) -> Head:
        return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self._names[0])

    def _streams(
        self,
        request_id: str,
        prompts: Sequence[ReadyPrompt],
        params: SamplingParams,
        body: GenerationBody,
    ) -> list[AsyncGenerator[RequestDelta, None]]:
        """Of each prompt; nothing is sent to the engine before a stream is read."""
        return [
            self._engine.generate(
                prompt.for_engine,
                params,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
            for number, prompt in enumerate(prompts)
        ]


class Run(Generic[Chunk, Whole]):
    """One request on its way; read it once, by `chunks` or `whole`. Whoever stops reading, or is
    cancelled, thereby ends it in the engine, too."""

    def __init__(
        self,
        streams: Sequence[AsyncGenerator[RequestDelta, None]],
        chunker: Chunker[Chunk],
        joiner: Joiner[Chunk, Whole],
        watch: Watch,
    ) -> None:
        self._streams = streams
        self._chunker = chunker
        self._joiner = joiner
        self._watch = watch

    async def chunks(self) -> AsyncGenerator[Sequence[Chunk], None]:
        """Chunks as they come, some at a time; without the usage chunk.

        Raises what is wrong with the request before the first ones, and the engine's faults, kin of
        EngineError, at any time.
        """
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(_merged(self._streams)) as deltas:
                async for prompt, delta in deltas:
                    _refuse_abort(delta)
                    self._watch.take(prompt, delta)
                    if delta.prompt_logprobs is None:
                        chunks = self._chunker.chunks(prompt, delta)
                    else:  # thousands of small objects: not on the loop that all share
                        chunks = await asyncio.to_thread(self._chunker.chunks, prompt, delta)
                    if chunks:
                        yield chunks
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._watch.end(error)

    def usage_chunk(self) -> Chunk:
        """Usage, without choices; after the last chunks."""
        return self._chunker.usage_chunk()

    async def whole(self) -> Whole:
        """All chunks joined, with usage. Raises as `chunks` does."""
        joiner = self._joiner
        async with contextlib.aclosing(self.chunks()) as pieces:
            async for chunks in pieces:
                for chunk in chunks:
                    joiner.add(chunk)
        joiner.add(self.usage_chunk())
        return joiner.whole()


def _refuse_abort(delta: RequestDelta) -> None:
    """Half an answer is none."""
    if any(answer.finish_reason == "abort" for answer in delta.outputs):
        raise unavailable("The request was ended, because the server is shutting down.")


async def _merged(
    streams: Sequence[AsyncGenerator[RequestDelta, None]],
) -> AsyncGenerator[tuple[int, RequestDelta], None]:
    """Deltas with the number of their stream, in the order in which they come. The first exception
    of a stream ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, RequestDelta] | BaseException | None] = asyncio.Queue(
        maxsize=len(streams)
    )

    async def pump(number: int) -> None:
        try:
            async with contextlib.aclosing(streams[number]) as deltas:
                async for delta in deltas:
                    await arrived.put((number, delta))
        except RequestError as error:
            # Of what all share, each is refused alike.
            is_own = error.field == "prompt_embeds"
            text = f"prompt_embeds[{number}]: {error}" if is_own else str(error)
            await arrived.put(RequestError(text, field=error.field))
        except Exception as error:
            await arrived.put(error)
        else:
            await arrived.put(None)

    tasks = [asyncio.create_task(pump(number)) for number in range(len(streams))]
    try:
        num_open = len(streams)
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
