"""A request on its way from the engine to whoever iterates over its deltas. No torch."""

from __future__ import annotations

import asyncio

from pelton.core.request import Request
from pelton.engine.answers import Answer
from pelton.engine.outputs import AnswerDelta, RequestDelta
from pelton.messages.from_engine import Ended, First
from pelton.messages.logprobs import unpack_rows
from pelton.tokens.tokenizer import Tokenizer


class Stream:
    """One open request. Deltas that nobody has fetched yet are merged, so that a slow consumer
    costs no more memory than the answers themselves.

    Args:
        handle: of answer 0; answer i has handle + i.

    error: what ends the stream once what came before it has been fetched.
    """

    def __init__(self, request: Request, handle: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.handle = handle
        self.answers = [Answer(request, tokenizer, index) for index in range(request.params.n)]
        self.error: Exception | None = None
        self._num_open = len(self.answers)
        self._pending: dict[int, AnswerDelta] = {}
        self._first: First | None = None
        self._is_first = True
        self._num_cached_tokens = 0
        self._num_preemptions = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all answers have ended, fetched or not."""
        return self._num_open == 0

    def put(self, delta: AnswerDelta) -> None:
        """Take what was added to an answer. A failed answer fails the stream."""
        if delta.finish_reason is not None:
            self._num_open -= 1
        if delta.error is not None:
            self.fail(delta.error)
            return
        pending = self._pending.get(delta.index)
        if pending is None:
            self._pending[delta.index] = delta
        else:
            pending.merge(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        if self.error is None:
            self.error = error
        self._wake()

    def note_first(self, first: First) -> None:
        """Of answer 0; comes before its first delta."""
        self._first = first
        self._num_cached_tokens = first.num_cached_tokens

    def note_end(self, ended: Ended) -> None:
        self._num_preemptions += ended.num_preemptions

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestDelta:
        """Wait for news. Raises the stream's error when there are none left. One caller at a time;
        not to be called again after a delta that says `finished`."""
        while not self._pending and self.error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._pending:
            assert self.error is not None
            raise self.error
        outputs = [delta for _, delta in sorted(self._pending.items())]
        self._pending = {}
        delta = RequestDelta(
            request_id=self.request.request_id,
            outputs=outputs,
            finished=self._num_open == 0 and self.error is None,
            num_prompt_tokens=self.request.prompt_len,
            num_cached_tokens=self._num_cached_tokens,
            num_preemptions=self._num_preemptions,
        )
        if self._is_first:
            self._is_first = False
            await self._complete_first(delta)
        return delta

    async def _complete_first(self, delta: RequestDelta) -> None:
        delta.prompt_token_ids = self.request.prompt_token_ids
        if self._first is None:
            return
        delta.queue_seconds = self._first.queue_seconds
        packed, self._first = self._first.prompt_logprobs, None
        if packed is not None:
            # Thousands of small objects for a long prompt: not on the loop that all share.
            rows = unpack_rows(packed)
            answer = self.answers[0]
            delta.prompt_logprobs = await asyncio.to_thread(answer.read_prompt_logprobs, rows)
