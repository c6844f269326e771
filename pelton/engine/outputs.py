"""What a user gets back; names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field

from pelton.sampling.logprobs import Logprob


@dataclass(slots=True)
class CompletionOutput:
    """One answer.

    finish_reason: "stop", "length", "abort", "error", or None while unfinished. stop_reason: the
        stop string or stop token id that ended it, None for the end-of-sequence token.
    logprobs: per output token {token id: Logprob}, if asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One request.

    prompt_logprobs: if asked for, [prompt_len] of {token id: Logprob}, the prompt's own first;
        None for the first token, which nothing comes before. All at once, with the first output
        token.
    outputs: its n answers, by index. finished: whether all of them have ended.
    num_cached_tokens: prompt tokens that the prefix cache provided, for the first answer.
    error: why the first answer that failed (finish_reason "error") did, else None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    error: Exception | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
