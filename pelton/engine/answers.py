"""From what a step yielded to what a user sees, one answer at a time. No torch."""

from __future__ import annotations

from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.outputs import AnswerDelta, CompletionOutput, RequestOutput
from pelton.errors import RequestFailed
from pelton.sampling.logprobs import Logprob, token_logprobs
from pelton.tokens.detokenizer import OutputText
from pelton.tokens.tokenizer import Tokenizer


class Answer:
    """Makes text and log-probabilities of one answer's tokens.

    Of the request only the prompt and the parameters are read, so that all answers of a request
    can share one.

    is_finished: whether a delta with a finish_reason has been given out.
    needs_every_step: whether what a step yields must be taken before the next one: a stop string
        may end it there, or log-probabilities come along.
    prompt_logprobs: see RequestOutput; there with the first token, if asked for.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, index: int = 0) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.is_finished = False
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._tokenizer = tokenizer
        self._asks_logprobs = params.logprobs is not None
        self.needs_every_step = self._asks_logprobs or bool(params.stop_strings)
        self._text: OutputText | None = None
        if params.detokenize and tokenizer is not None:
            self._text = OutputText(
                tokenizer,
                request.known_token_ids[: request.prompt_len],
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )

    def completion(self) -> CompletionOutput:
        """Nothing yet; `add` this answer's deltas to it."""
        return CompletionOutput(
            index=self.index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0 if self._asks_logprobs else None,
            logprobs=[] if self._asks_logprobs else None,
        )

    def take(self, update: RequestUpdate, rows: LogprobRows | None) -> AnswerDelta:
        """What a step adds. Where a stop string ends the answer, the delta has a finish_reason and
        the update has none: the engine goes on, and the caller then aborts the request."""
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = self.read_prompt_logprobs(update.prompt_logprobs)
        ids = update.new_token_ids
        reason = update.finish_reason
        text, matched = "", None
        if self._text is not None:
            delta = self._text.push(ids, ends=reason == "stop")
            text, matched = delta.text, delta.matched_stop
            ids = ids[: delta.num_tokens_used]
            if matched is None and reason is not None:
                rest = self._text.finish()
                text += rest.text
                matched = rest.matched_stop
        logprobs = None
        if self._asks_logprobs:
            logprobs = (
                self._take_logprobs(rows, update, len(ids)) if rows is not None and ids else []
            )
        if matched is not None:
            self.is_finished = True
            return AnswerDelta(self.index, text, ids, logprobs, "stop", matched)
        self.is_finished = reason is not None
        return AnswerDelta(
            self.index,
            text,
            ids,
            logprobs,
            reason,
            update.stop_reason,
            update.error,
            update.pooled,
        )

    def fail(self, error: Exception) -> AnswerDelta:
        """The end, with "error"."""
        self.is_finished = True
        return AnswerDelta(self.index, finish_reason="error", error=error)

    def abort(self) -> AnswerDelta:
        """The end, with "abort"."""
        self.is_finished = True
        return AnswerDelta(self.index, finish_reason="abort")

    def read_prompt_logprobs(self, rows: LogprobRows) -> list[dict[int, Logprob] | None]:
        """rows: of the prompt's tokens from the second on. See RequestOutput."""
        request = self.request
        found = token_logprobs(
            rows,
            0,
            request.known_token_ids[1 : request.prompt_len].tolist(),
            request.params.prompt_logprobs or 0,
            self._token_text,
        )
        return [None, *(token.as_dict() for token in found)]

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)

    def _take_logprobs(
        self, rows: LogprobRows, update: RequestUpdate, count: int
    ) -> list[dict[int, Logprob]]:
        found = token_logprobs(
            rows,
            update.first_row,
            update.new_token_ids[:count],
            self.request.params.logprobs or 0,
            self._token_text,
        )
        return [token.as_dict() for token in found]


def failed_output(request_id: str, prompt: str | None, error: Exception) -> RequestOutput:
    """The output of a request that never got into the engine."""
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")],
        finished=True,
        error=error,
    )


def as_request_failure(request_id: str, error: Exception) -> RequestFailed:
    """A fault of ours, told in terms of the request that it hit."""
    failure = RequestFailed(f"Request {request_id} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
