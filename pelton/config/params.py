"""What a request may ask: `SamplingParams`. Names and defaults are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pelton.errors import RequestError

# Known names of other engines that this version does not do: the values that ask for nothing.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "structured_outputs": (None,),
}

_INT64 = 2**63 - 1
_BOOLEANS = ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")

# Tokens of all bad words, each counted as long as the longest.
MAX_BAD_WORD_TOKENS = 2**16

# Answers to one request. Each is a request of its own for the engine.
MAX_N = 1024

# Far above what makes all tokens about equally likely.
MAX_TEMPERATURE = 100.0


def _number(
    field_name: str, value: Any, low: float, high: float, *, open_low: bool = False
) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The comparison is first: math.isfinite cannot take an int that is beyond all floats.
    if not is_number or not (abs(value) <= 1e300 and math.isfinite(value)):
        raise RequestError(
            f"{field_name} must be a finite number, got {value!r}.", field=field_name
        )
    if value < low or value > high or (open_low and value == low):
        left = "(" if open_low else "["
        raise RequestError(
            f"{field_name} must be in {left}{low:g}, {high:g}], got {value!r}.", field=field_name
        )


def _integer(field_name: str, value: Any, low: int, high: int = _INT64) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{field_name} must be an integer, got {value!r}.", field=field_name)
    if not low <= value <= high:
        limit = f"between {low} and {high}"
        if high == _INT64 and value < low and low > -_INT64:
            limit = f"at least {low}"
        raise RequestError(f"{field_name} must be {limit}, got {value!r}.", field=field_name)


def _int32(field_name: str, value: Any) -> int:
    """Whether it lies in a vocabulary, the engine says."""
    _integer(field_name, value, -(2**31), 2**31 - 1)
    return int(value)


def _bias_key(value: Any) -> int:
    """As _int32; it is not the bias that is wrong."""
    try:
        return _int32("logit_bias", value)
    except RequestError as error:
        raise RequestError(f"A token id of {error}", field="logit_bias") from None


def _list(field_name: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{field_name} must be a list, got {value!r}.", field=field_name)
    return list(value)


def _logit_bias(given: Any) -> dict[int, float] | None:
    """Keys as integers; JSON has them as strings."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise RequestError(
            f"logit_bias must be a dict of token id to bias, got {given!r}.", field="logit_bias"
        )
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = key
        if isinstance(key, str) and key.isascii() and key.removeprefix("-").isdigit():
            token = int(key)
        token = _bias_key(token)
        _number("logit_bias", bias, -100.0, 100.0)
        if token in biases:
            raise RequestError(f"logit_bias has token {token} twice.", field="logit_bias")
        biases[token] = float(bias)
    return biases


def _allowed_ids(given: Any) -> tuple[int, ...] | None:
    """Each once, in order."""
    if given is None:
        return None
    ids = [_int32("allowed_token_ids", token) for token in _list("allowed_token_ids", given)]
    if not ids:
        raise RequestError(
            "allowed_token_ids must hold at least 1 token id, got an empty list; leave it at None "
            "to allow all.",
            field="allowed_token_ids",
        )
    return tuple(dict.fromkeys(ids))


def _bad_words(given: Any) -> tuple[str, ...] | None:
    if given is None:
        return None
    words = _list("bad_words", given)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise RequestError(
                f"bad_words must hold strings with a visible character, got {word!r}.",
                field="bad_words",
            )
    return tuple(words)


def _bad_words_ids(given: Any) -> tuple[tuple[int, ...], ...]:
    words = tuple(
        tuple(_int32("bad_words", token) for token in _list("bad_words_token_ids", word))
        for word in _list("bad_words_token_ids", given)
    )
    if not all(words):
        raise RequestError("bad_words must have at least 1 token each.", field="bad_words")
    size = len(words) * max(map(len, words), default=0)
    if size > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words may have {MAX_BAD_WORD_TOKENS} tokens, each counted as long as the longest "
            f"(with and without a leading space); these have {size}.",
            field="bad_words",
        )
    return words


def _processors(given: Any) -> dict[str, dict[str, Any]] | None:
    """name -> keyword arguments."""
    if given is None:
        return None
    names = given if isinstance(given, Mapping) else {name: {} for name in _names(given)}
    asked: dict[str, dict[str, Any]] = {}
    for name, arguments in names.items():
        if not isinstance(name, str):
            raise RequestError(_BY_NAME.format(name), field="logits_processors")
        if not isinstance(arguments, Mapping) or not all(isinstance(k, str) for k in arguments):
            raise RequestError(
                f"logits_processors[{name!r}] must be a dict of keyword arguments, got "
                f"{arguments!r}.",
                field="logits_processors",
            )
        asked[name] = dict(arguments)
    return asked


def _names(given: Any) -> list[str]:
    names = _list("logits_processors", [given] if callable(given) else given)
    for name in names:
        if not isinstance(name, str):
            raise RequestError(_BY_NAME.format(name), field="logits_processors")
    return names


_BY_NAME = (
    "logits_processors are given by name, got {!r}: register the function with "
    "pelton.sampling.table.register(name, 'module:function'), and pass the name."
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    n: answers to one prompt, at most 1024; with temperature 0 all are the same. Answer i is that of
        a request with seed + i, or has noise of its own without a seed. The prompt is computed once
        if prefix caching is on, but for its last, partial block; else once per answer.
    temperature: 0 = greedy, at most 100; below 0.01 it is treated as 0.01, so that logits / T stays
        finite.
    top_k: only the so many most likely tokens are drawn; 0 or -1 = off.
    top_p: only the most likely tokens that have this probability together, in (0, 1]; 1 = off.
    min_p: only tokens that are at least this times as likely as the most likely one, in [0, 1].
    presence_penalty: taken from the logit of each token that the output has, in [-2, 2].
    frequency_penalty: the same for each time that the output has it, in [-2, 2].
    repetition_penalty: in [1e-6, 1e6]; above 1 makes every token of prompt and output less likely.
    logit_bias: token id -> what is added to its logit, in [-100, 100].
    allowed_token_ids: no other token is drawn.
    bad_words: texts whose own tokens, with and without a leading space, the output will not hold in
        a row. The same letters can still come by other tokens: "pla" as a part of " place".
    bad_words_token_ids: the same as token ids; the engine fills it from bad_words.
    logits_processors: names from pelton/sampling/table.py, as a list, or as name -> arguments.
    seed: fixes the request's noise; without it the engine draws one. Same seed, same answer with
        batch_invariant=True; otherwise nearly always, since what runs beside a request, and a
        cached prefix, change the last bits of its logits.
    stop: text, or a list of texts, that ends the answer and is cut off from it.
    stop_token_ids: tokens that end the answer.
    include_stop_str_in_output: leave the stop text in the answer.
    ignore_eos: go on after the model's end token.
    skip_special_tokens: leave the text of special tokens out of the answer.
    detokenize: make text of the tokens.
    max_tokens: most tokens of the answer; None = as many as fit the context.
    min_tokens: no end token and no stop string counts before this many output tokens.
    logprobs: None = none; n = the sampled token's and the n most likely ones'.
    prompt_logprobs: the same for the prompt's tokens from the second on. A request that asks does
        not read the prefix cache until it has them, since a hit has no logits.

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
    bad_words: list[str] | tuple[str, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    structured_outputs: Any = None
    logits_processors: dict[str, dict[str, Any]] | list[str] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, neutral in _NOT_YET.items():
            value = getattr(self, name)
            if not any(type(value) is type(one) and value == one for one in neutral):
                raise RequestError(
                    f"{name}={value!r} is not supported by this version of Pelton; leave {name} at "
                    f"{neutral[0]!r}.",
                    field=name,
                )
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < 0.01:
            object.__setattr__(self, "temperature", 0.01)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed_ids(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(
            self, "bad_words_token_ids", _bad_words_ids(self.bad_words_token_ids or ())
        )
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
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
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 0:
                raise RequestError(
                    f"{name} must be between 0 and the engine's max_logprobs, got {value}; the "
                    f"whole vocabulary cannot be asked for.",
                    field=name,
                )
            if value is not None:
                _integer(name, value, 0)
        for name in _BOOLEANS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name} must be True or False, got {getattr(self, name)!r}.", field=name
                )
        stop = [self.stop] if isinstance(self.stop, str) else _list("stop", self.stop or ())
        for text in stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop must hold non-empty strings, got {text!r}.", field="stop")
        object.__setattr__(self, "stop", tuple(stop))
        if stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True.", field="stop")
        ids = [] if self.stop_token_ids is None else _list("stop_token_ids", self.stop_token_ids)
        for token in ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def token_id_fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(field, ids) of all that must lie in the model's vocabulary."""
        yield "stop_token_ids", tuple(self.stop_token_ids or ())
        yield "logit_bias", tuple(self.logit_bias or ())
        yield "allowed_token_ids", tuple(self.allowed_token_ids or ())
        yield "bad_words", tuple(token for word in self.bad_words_token_ids for token in word)

    @property
    def processors(self) -> dict[str, dict[str, Any]]:
        """Normalised `logits_processors`: name -> arguments."""
        return self.logits_processors or {}  # type: ignore[return-value]

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Normalised `stop`."""
        return self.stop  # type: ignore[return-value]
