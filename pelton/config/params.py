"""What a request may ask: `SamplingParams`. Names and defaults are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from pelton.errors import RequestError

# Known names of other engines that this version does not do: (neutral value, what to say).
_NOT_YET: dict[str, Any] = {
    "best_of": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "logits_processors": None,
}


def _number(
    field_name: str, value: Any, low: float, high: float, *, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(
            f"{field_name} must be a finite number, got {value!r}.", field=field_name
        )
    if value < low or value > high or (open_low and value == low):
        left = "(" if open_low else "["
        raise RequestError(
            f"{field_name} must be in {left}{low:g}, {high:g}], got {value!r}.", field=field_name
        )


def _integer(field_name: str, value: Any, low: int, high: int = 2**63 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field_name} must be an integer, got {value!r}.", field=field_name)
    if not low <= value <= high:
        raise RequestError(
            f"{field_name} must be between {low} and {high}, got {value!r}.", field=field_name
        )


MAX_N = 16_384


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    n: answers to one prompt, at most MAX_N; more than one need a temperature. Answer i is that of a
        request with seed + i, or has noise of its own without a seed. The prompt is computed once
        if prefix caching is on, but for its last, partial block; else once per answer.
    temperature: 0 = greedy; below 0.01 it is treated as 0.01, so that logits / T stays finite.
    top_k: 0 or -1 = off. top_p in (0, 1], min_p in [0, 1].
    seed: fixes the request's noise; without it the engine draws one.
    stop / stop_token_ids: end the answer; stop strings are cut from the text unless
        include_stop_str_in_output.
    max_tokens: None = as many as fit the context.
    min_tokens: no end token and no stop string counts before this many output tokens.
    logprobs: None = none; n = the sampled token's and the n most likely ones'.

    Raises RequestError naming field, value and limit.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: Any = None
    logits_processors: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, neutral in _NOT_YET.items():
            if getattr(self, name) != neutral:
                raise RequestError(
                    f"{name}={getattr(self, name)!r} is not supported by this version of Pelton; "
                    f"leave {name} at {neutral!r}.",
                    field=name,
                )
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n must be 1 with temperature=0, since all answers would be the same; got "
                f"{self.n}. Set a temperature above 0.",
                field="n",
            )
        if 0.0 < self.temperature < 0.01:
            object.__setattr__(self, "temperature", 0.01)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63))
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}.",
                field="min_tokens",
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}.", field="stop")
        object.__setattr__(self, "stop", stop)
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True.", field="stop")
        ids = tuple(self.stop_token_ids or ())
        for token in ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Normalised `stop`."""
        return self.stop  # type: ignore[return-value]
