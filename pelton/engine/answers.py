"""From what a step yielded to what a user sees, one answer at a time."""

from __future__ import annotations

from pelton.core.plan import LogprobRows
from pelton.core.request import Request
from pelton.core.scheduler import RequestUpdate
from pelton.engine.outputs import CompletionOutput, RequestOutput
from pelton.errors import RequestFailed
from pelton.sampling.logprobs import Logprob, token_logprobs
from pelton.tokens.detokenizer import OutputText
from pelton.tokens.tokenizer import Tokenizer


class Answer:
    """Collects one answer's tokens, text and log-probabilities.

    completion: always up to date. error: why it failed.
    prompt_logprobs: see RequestOutput; there with the first token, if asked for.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, index: int = 0) -> None:
        params = request.params
        self.request = request
        self.error: Exception | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._tokenizer = tokenizer
        self._text: OutputText | None = None
        if params.detokenize and tokenizer is not None:
            self._text = OutputText(
                tokenizer,
                request.known_token_ids,
                stop=params.stop_strings,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
        asks_logprobs = params.logprobs is not None
        self.completion = CompletionOutput(
            index=index,
            text="",
            token_ids=[],
            cumulative_logprob=0.0 if asks_logprobs else None,
            logprobs=[] if asks_logprobs else None,
        )

    @property
    def is_finished(self) -> bool:
        return self.completion.finish_reason is not None

    def take(self, update: RequestUpdate, rows: LogprobRows | None) -> bool:
        """Add what a step yielded. Returns whether a stop string ended the answer although the
        engine goes on: the caller then aborts the request."""
        if update.prompt_logprobs is not None:
            self._take_prompt_logprobs(update.prompt_logprobs)
        completion = self.completion
        ids = update.new_token_ids
        reason = update.finish_reason
        num_used, matched = len(ids), None
        if self._text is not None:
            delta = self._text.push(ids, ends=reason == "stop")
            completion.text += delta.text
            num_used, matched = delta.num_tokens_used, delta.matched_stop
            if matched is None and reason is not None:
                rest = self._text.finish()
                completion.text += rest.text
                matched = rest.matched_stop
        completion.token_ids += ids[:num_used].tolist()
        if completion.logprobs is not None and rows is not None and num_used:
            self._take_logprobs(rows, update, num_used)
        if matched is not None:
            self.finish("stop", matched)
        elif reason is not None:
            self.finish(reason, self.request.stop_reason)
            self.error = self.request.error
        return matched is not None and reason is None

    def fail(self, error: Exception) -> None:
        """End with "error"."""
        self.error = error
        self.finish("error")

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.completion.finish_reason = reason
        self.completion.stop_reason = stop_reason

    def _take_prompt_logprobs(self, rows: LogprobRows) -> None:
        request = self.request
        found = token_logprobs(
            rows,
            0,
            request.known_token_ids[1 : request.prompt_len],
            request.params.prompt_logprobs or 0,
            self._token_text,
        )
        self.prompt_logprobs = [None, *(token.as_dict() for token in found)]

    def _token_text(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token)

    def _take_logprobs(self, rows: LogprobRows, update: RequestUpdate, count: int) -> None:
        completion = self.completion
        assert completion.logprobs is not None
        assert completion.cumulative_logprob is not None
        wanted = self.request.params.logprobs or 0
        for token in token_logprobs(
            rows,
            update.first_row,
            update.new_token_ids[:count],
            wanted,
            self._token_text,
        ):
            completion.logprobs.append(token.as_dict())
            completion.cumulative_logprob += token.logprob.logprob


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
