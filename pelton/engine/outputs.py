"""What a user gets back; names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pelton.core.plan import Float32Array, Int32Array
from pelton.sampling.logprobs import Logprob


@dataclass(slots=True)
class AnswerDelta:
    """What was added to one answer since the last delta.

    text, token_ids, logprobs: to be appended. Text may lag behind its tokens: half a character, or
        the beginning of a stop string, is held back.
    finish_reason, stop_reason: see CompletionOutput; with the answer's last delta.
    error: why, where the reason is "error".
    pooled: the result of a request that is pooled, see PoolingOutput; with the only delta.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None
    pooled: Float32Array | None = None

    def merge(self, later: AnswerDelta) -> None:
        """Become this delta and the one that followed it in one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.pooled = later.pooled


@dataclass(slots=True)
class RequestDelta:
    """What was added to a request's answers since its last delta.

    outputs: of the answers that got something, by index.
    finished: whether all answers have ended; this is the last delta then.
    prompt_token_ids: [num_prompt_tokens] int32, and prompt_logprobs, as in RequestOutput: in the
        first delta only, else None.
    num_cached_tokens: prompt tokens that the prefix cache provided, for the first answer.
    queue_seconds: from the engine's sight of the request to its first row; in the first delta only.
    num_preemptions: of all answers so far.
    """

    request_id: str
    outputs: list[AnswerDelta]
    finished: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int = 0
    prompt_token_ids: Int32Array | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    queue_seconds: float | None = None


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

    def add(self, delta: AnswerDelta) -> None:
        """Append what a step yielded."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None and delta.logprobs is not None:
            assert self.cumulative_logprob is not None
            self.logprobs += delta.logprobs
            for token, entries in zip(delta.token_ids, delta.logprobs):
                self.cumulative_logprob += entries[token].logprob
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """One request.

    prompt_token_ids: [prompt_len], -1 where the prompt has an embedding.
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


@dataclass(slots=True)
class PoolingOutput:
    """data: float32, [D] for a whole prompt, [T, D] for T of its tokens."""

    data: Float32Array


@dataclass(slots=True)
class EmbeddingOutput:
    """embedding: as many numbers as the model has, or as `dimensions` asked for."""

    embedding: list[float]

    @classmethod
    def of(cls, output: PoolingOutput) -> EmbeddingOutput:
        return cls(output.data.tolist())


@dataclass(slots=True)
class ClassificationOutput:
    """probs: of each class; its score, where no activation was asked for."""

    probs: list[float]

    @classmethod
    def of(cls, output: PoolingOutput) -> ClassificationOutput:
        return cls(output.data.tolist())

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """score: how well the two texts of a pair go together; higher is better."""

    score: float

    @classmethod
    def of(cls, output: PoolingOutput) -> ScoringOutput:
        """Of a classifier of one class."""
        return cls(float(output.data[0]))


Pooled = TypeVar("Pooled")
Converted = TypeVar("Converted")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """One request of a pooling engine.

    outputs: what was asked for; None if it failed, and error says why. num_cached_tokens: prompt
    tokens that the prefix cache provided.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Pooled | None = None
    finished: bool = False
    num_cached_tokens: int = 0
    error: Exception | None = None

    def as_kind(self, make: Callable[[Pooled], Converted]) -> PoolingRequestOutput[Converted]:
        """The same request, its result in the form that `make` gives it."""
        return PoolingRequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=None if self.outputs is None else make(self.outputs),
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
