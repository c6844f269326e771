"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pelton.config.params import SamplingParams
from pelton.errors import RequestError
from pelton.server.protocol import UNSUPPORTED, ChatBody, CompletionBody, GenerationBody

# max_tokens means another thing for each of the two.
_SHARED = [
    field.name
    for field in fields(SamplingParams)
    if field.name in GenerationBody.__struct_fields__
    and field.name not in {*UNSUPPORTED, "max_tokens"}
]
_COMPLETION_MAX_TOKENS = 16


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """defaults: what holds for fields that the request leaves out, before those of SamplingParams.

    Raises RequestError naming field, value and limit.
    """
    values = _shared(body, defaults)
    values["max_tokens"] = _COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if is_echo_alone(body):
        values["max_tokens"] = 1  # the engine's least; `streaming` drops it
        values["min_tokens"] = 0
    values["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    return SamplingParams(**values)


def is_echo_alone(body: CompletionBody) -> bool:
    """Whether only the prompt is wanted, with its log-probabilities perhaps."""
    return bool(body.echo) and body.max_tokens == 0


def asked_tokens(body: GenerationBody) -> tuple[str, int | None]:
    """The field that says how many tokens an answer may have, and its value if it is given."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    return "max_tokens", body.max_tokens


def chat_params(
    body: ChatBody, defaults: Mapping[str, Any], *, max_logprobs: int
) -> SamplingParams:
    """As `completion_params`, for a chat. max_logprobs: the engine's most alternatives."""
    values = _shared(body, defaults)
    values["max_tokens"] = _chat_max_tokens(body)
    top = body.top_logprobs or 0
    if top and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true.", field="top_logprobs")
    if not 0 <= top <= max_logprobs:
        raise RequestError(
            f"top_logprobs must be between 0 and {max_logprobs} (max_logprobs), got {top}.",
            field="top_logprobs",
        )
    if body.logprobs:
        values["logprobs"] = top
    return SamplingParams(**values)


def _chat_max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={old} and max_completion_tokens={new} mean the same; give one of them.",
            field="max_completion_tokens",
        )
    most = old if new is None else new
    if new is not None and not 1 <= new < 2**63:
        raise RequestError(
            f"max_completion_tokens must be at least 1, got {new}."
            if new < 1
            else f"max_completion_tokens must be at most {2**63 - 1}, got {new}.",
            field="max_completion_tokens",
        )
    return most


def _shared(body: GenerationBody, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream=true.", field="stream_options")
    given = {name: getattr(body, name) for name in _SHARED}
    return {**defaults, **{name: value for name, value in given.items() if value is not None}}
