"""What the engine process tells the API process."""

from __future__ import annotations

from typing import Literal

import msgspec

from pelton.core.scheduler import SchedulerStats
from pelton.errors import EngineError, RequestError, RequestFailed
from pelton.messages.logprobs import PackedRows
from pelton.messages.pooled import PackedPooled


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """The answer to Start, before anything heavy."""

    version: int
    pid: int


class Phase(msgspec.Struct, tag="phase", array_like=True, frozen=True):
    """A start phase has ended, after `seconds`."""

    name: str
    seconds: float


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """Requests are taken from now on.

    config: a pickled EngineConfig.
    """

    config: bytes


class Fault(msgspec.Struct, array_like=True, frozen=True):
    """Why a request ended with "error". kind: whose fault it is."""

    kind: Literal["request", "failed"]
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Only RequestError is the user's fault."""
        if isinstance(error, RequestError):
            return cls("request", str(error), error.field)
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        return cls("failed", text)

    def as_error(self) -> RequestError | RequestFailed:
        if self.kind == "request":
            return RequestError(self.message, field=self.field)
        return RequestFailed(self.message)


class First(msgspec.Struct, array_like=True, frozen=True):
    """Comes with an answer's first token.

    queue_seconds: from its arrival in the engine to its first row.
    prompt_logprobs: of tokens 1, 2, ... of the prompt, if asked for.
    """

    handle: int
    num_cached_tokens: int
    queue_seconds: float
    prompt_logprobs: PackedRows | None = None


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """Comes with an answer's last tokens, or without any.

    reason: "stop", "length" or "error". stop_token: the stop token id that did it, if one did.
    pooled: the result of a request that is pooled.
    """

    handle: int
    reason: Literal["stop", "length", "error"]
    num_preemptions: int = 0
    stop_token: int | None = None
    fault: Fault | None = None
    pooled: PackedPooled | None = None


class StepStats(msgspec.Struct, array_like=True, frozen=True):
    """The step whose tokens travel along: answers that got some, how many, and how long the loop's
    turn took that brought them, in seconds."""

    num_rows: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """One frame per step: what it yielded for all requests. Without any where only the stats have
    changed.

    handles: [m] int64, answers that got tokens. counts: [m] int32, how many; empty means 1 each.
    token_ids: [sum(counts)] int32, in the order of handles.
    logprobs: of the answers that asked for some. num_rows: [m] int32, how many of its rows belong
        to each answer. Both in the order of handles.
    first, ended: of the answers whose first or last tokens these are.
    """

    handles: bytes
    counts: bytes
    token_ids: bytes
    first: list[First]
    ended: list[Ended]
    scheduler: SchedulerStats
    step: StepStats
    num_rows: bytes = b""
    logprobs: PackedRows | None = None


class CacheReset(msgspec.Struct, tag="cache reset", array_like=True, frozen=True):
    """done: false while requests were running; nothing has changed then."""

    done: bool


class Dead(msgspec.Struct, tag="dead", array_like=True, frozen=True):
    """The last message of a process that cannot go on.

    kind: name of a class in errors.py that the user should get, or "EngineDead".
    traceback: as Python prints it.
    """

    kind: str
    message: str
    traceback: str


FromEngine = Hello | Phase | Ready | Outputs | CacheReset | Dead
