"""From what a user passes as a prompt to a Request. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from pelton.checkpoint.gguf_header import read_gguf_header
from pelton.checkpoint.source import resolve_checkpoint
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.params import SamplingParams
from pelton.config.pooling import NEEDS_TOKEN_IDS, PoolingParams, wrong_runner
from pelton.config.reasons import reason_of
from pelton.core.plan import Int32Array
from pelton.core.prompt_embeds import PromptEmbeds, placeholders
from pelton.core.request import Request, as_token_ids
from pelton.engine.prompt_embeds import as_mix, as_prompt_embeds
from pelton.errors import ConfigError, RequestError
from pelton.sampling.table import processor_target
from pelton.setup.check import CheckedArgs, check
from pelton.tokens.chat_template import ChatTemplate, ContentChoice
from pelton.tokens.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Mapping[str, Any]
"""Text, or a mapping; each may also have "cache_salt":

    {"prompt": text}
    {"prompt": text, "prompt_pair": text}   two that a pooling model reads together
    {"prompt_token_ids": [T]}               and for a pair "token_type_ids" [T], 0s and then 1s
    {"prompt_embeds": [T, H]}           embeddings, as transformers' models take `inputs_embeds`
    {"prompt_embeds": [T, H] or [n, H], "prompt_token_ids": [T], "prompt_is_token_ids": [T]}
        a mix: token ids where prompt_is_token_ids is true, embeddings at the other n places; the
        ids of those, and rows of the token ids' places, are not looked at

Token ids alone may have "prompt" beside, to be shown with the answer.
"""

_KEYS = (
    "prompt",
    "prompt_pair",
    "prompt_token_ids",
    "token_type_ids",
    "prompt_embeds",
    "prompt_is_token_ids",
    "cache_salt",
)


_MAX_COMPLETED = 256
"""Different PoolingParams that are remembered."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """ids: with placeholders where `embeds` stand. second: where the second text begins."""

    text: str | None
    ids: Int32Array | Sequence[int]
    salt: str | None
    embeds: PromptEmbeds | None = None
    second: int | None = None


class PromptReader:
    """Validates prompts against one engine and makes Requests of them."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer | None) -> None:
        self._config = config
        self._tokenizer = tokenizer
        # Thousands of texts are asked about in a few ways.
        self._completed = lru_cache(_MAX_COMPLETED)(config.pooling.complete)
        eos = set(config.generation.eos_token_ids)
        if tokenizer is not None:
            eos |= tokenizer.end_token_ids
        self._eos_token_ids = tuple(sorted(eos))

    def read(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int = 0
    ) -> tuple[Request, str | None]:
        """The request, and the prompt's text if it was given as text.

        Raises RequestError naming field, value and limit.
        """
        if self._config.pools:
            raise wrong_runner(pools=True)
        parts = self._parts(prompt)
        self._check_params(params)
        params = self._with_bad_words(params)
        request = Request(
            request_id,
            parts.ids,
            params,
            priority=priority,
            cache_salt=parts.salt,
            eos_token_ids=self._eos_token_ids,
            prompt_embeds=parts.embeds,
        )
        return request, parts.text

    def read_pooled(
        self, request_id: str, prompt: Prompt, params: PoolingParams, *, priority: int = 0
    ) -> tuple[Request, str | None]:
        """As `read`, of a request that is pooled."""
        pooling = self._config.pooling
        params = self._completed(params)
        parts = self._parts(prompt, self._max_tokens(params))
        size = self._config.model.vocab_size
        if params.step_tag_id is not None and params.step_tag_id >= size:
            raise RequestError(
                f"step_tag_id must be a token id from 0 to {size - 1}, got {params.step_tag_id}.",
                field="step_tag_id",
            )
        if parts.embeds is not None and NEEDS_TOKEN_IDS in pooling.needs(params.method or ""):
            raise RequestError(
                f"method={params.method!r} needs the ids of all tokens, and prompt_embeds have "
                "none; give prompt_token_ids.",
                field="prompt_embeds",
            )
        request = Request(
            request_id,
            parts.ids,
            params,
            priority=priority,
            cache_salt=parts.salt,
            prompt_embeds=parts.embeds,
            second_segment=parts.second,
        )
        return request, parts.text

    def _max_tokens(self, params: PoolingParams) -> int | None:
        """What a longer prompt is cut to, if that was asked for."""
        asked, most = params.truncate_prompt_tokens, self._config.max_model_len
        if asked is not None and asked > most:
            raise RequestError(
                f"truncate_prompt_tokens must be at most max_model_len={most}, got {asked}.",
                field="truncate_prompt_tokens",
            )
        return most if asked == -1 else asked

    def _parts(self, prompt: Prompt, max_tokens: int | None = None) -> _Parts:
        if isinstance(prompt, str):
            return self._encoded(prompt, None, None, max_tokens)
        if not isinstance(prompt, Mapping):
            raise RequestError(
                "a prompt must be a string, {'prompt': ...} or {'prompt_token_ids': [...]}, got "
                f"{type(prompt).__name__}.",
                field="prompt",
            )
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown:
            raise RequestError(
                f"a prompt may have the keys {', '.join(_KEYS)}, got {unknown[0]!r}.",
                field="prompt",
            )
        salt = prompt.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise RequestError(
                f"cache_salt must be a non-empty string, got {salt!r}.", field="cache_salt"
            )
        text = prompt.get("prompt")
        self._check_pair(prompt)
        if prompt.get("prompt_embeds") is not None and text is not None:
            raise RequestError(
                "prompt and prompt_embeds exclude each other; leave one of them out.",
                field="prompt",
            )
        if text is None or isinstance(text, str):
            if prompt.get("prompt_embeds") is not None:
                if max_tokens is not None:
                    raise RequestError(
                        "truncate_prompt_tokens cuts text and token ids, not prompt_embeds.",
                        field="truncate_prompt_tokens",
                    )
                ids, embeds = self._with_embeds(prompt)
                return _Parts(text, ids, salt, embeds)
            if prompt.get("prompt_is_token_ids") is not None:
                raise RequestError(
                    "prompt_is_token_ids says where prompt_embeds stand, and there are none.",
                    field="prompt_is_token_ids",
                )
            if "prompt_token_ids" in prompt:
                ids = prompt["prompt_token_ids"]
                second = self._second_of(prompt.get("token_type_ids"), ids)
                # What is no list is refused with the rest of the request.
                if max_tokens is not None and isinstance(ids, (list, tuple, np.ndarray)):
                    ids = ids[:max_tokens]
                    second = second if second is None or second < len(ids) else None
                return _Parts(text, ids, salt, second=second)
        if not isinstance(text, str):
            raise RequestError(
                "a prompt needs 'prompt' (a string) or 'prompt_token_ids' (a list of integers).",
                field="prompt",
            )
        return self._encoded(text, prompt.get("prompt_pair"), salt, max_tokens)

    def _encoded(self, text: str, pair: Any, salt: str | None, max_tokens: int | None) -> _Parts:
        if pair is None and max_tokens is None:
            return _Parts(text, self._encode(text), salt)
        if not self._config.pools:
            raise RequestError(
                "prompt_pair is for engines that pool, and this one generates; write both texts "
                "into one prompt.",
                field="prompt_pair",
            )
        if pair is not None and not isinstance(pair, str):
            raise RequestError(
                f"prompt_pair must be a string, got {type(pair).__name__}.", field="prompt_pair"
            )
        ids, second = self._known_tokenizer().encode_pair(text, pair, max_tokens=max_tokens)
        return _Parts(text, ids, salt, second=self._known_segment(second))

    def _check_pair(self, prompt: Mapping[str, Any]) -> None:
        """Both ways to give a pair."""
        has_ids = "prompt_token_ids" in prompt or "prompt_embeds" in prompt
        if prompt.get("prompt_pair") is not None and has_ids:
            raise RequestError(
                "prompt_pair is the text behind another text; a pair of token ids is "
                "prompt_token_ids with token_type_ids.",
                field="prompt_pair",
            )
        if prompt.get("token_type_ids") is not None and (
            "prompt_token_ids" not in prompt or "prompt_embeds" in prompt
        ):
            raise RequestError(
                "token_type_ids say which of two texts each of prompt_token_ids is of; a pair of "
                "texts is 'prompt' and 'prompt_pair'.",
                field="token_type_ids",
            )

    def _known_segment(self, second: int | None) -> int | None:
        """None for a model that reads two texts as one."""
        return second if self._config.model.num_segments > 1 else None

    def _second_of(self, types: Any, ids: Any) -> int | None:
        """Where token_type_ids go from 0 to 1."""
        if types is None:
            return None
        if self._config.model.num_segments < 2:
            raise RequestError(
                "token_type_ids are for models that tell two texts apart, and this one does not; "
                "leave them out.",
                field="token_type_ids",
            )
        count = len(as_token_ids(ids))
        values = types.tolist() if isinstance(types, np.ndarray) else types
        is_list = isinstance(values, (list, tuple)) and len(values) == count
        if (
            not is_list
            or any(type(n) is not int or n not in (0, 1) for n in values)
            or (list(values) != sorted(values))
        ):
            raise RequestError(
                f"token_type_ids must be a list of {count} numbers, as many as "
                "prompt_token_ids has: 0s, and then 1s.",
                field="token_type_ids",
            )
        return values.index(1) if 1 in values else None

    def _with_embeds(self, prompt: Mapping[str, Any]) -> tuple[Int32Array, PromptEmbeds | None]:
        """Token ids, with placeholders, and the embeddings that these stand for."""
        if not self._config.enable_prompt_embeds:
            raise RequestError(
                "prompt_embeds need an engine with enable_prompt_embeds=True.",
                field="prompt_embeds",
            )
        given, is_token = prompt.get("prompt_token_ids"), prompt.get("prompt_is_token_ids")
        ids, is_row = np.zeros(0, np.int32), None
        if given is not None or is_token is not None:
            ids, is_row = as_mix(given, is_token)
            if not is_row.any():
                return ids, None
        embeds = as_prompt_embeds(
            prompt["prompt_embeds"],
            is_row,
            dtype=self._config.dtype,
            hidden_size=self._config.model.hidden_size,
            max_rows=self._config.max_model_len - (not self._config.pools),
        )
        if is_row is None:
            return placeholders(np.ones(len(embeds), np.bool_)), embeds
        return np.where(is_row, placeholders(is_row), ids), embeds

    def _encode(self, text: str) -> Int32Array:
        return self._known_tokenizer().encode(text)

    def _known_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(
                "this model has no tokenizer.json, so a prompt must be given as "
                "{'prompt_token_ids': [...]}.",
                field="prompt",
            )
        return self._tokenizer

    def _check_params(self, params: SamplingParams) -> None:
        most = min(self._config.max_logprobs, self._config.model.vocab_size)
        for name, value in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if value is not None and value > most:
                raise RequestError(
                    f"{name} must be at most {most} (max_logprobs), got {value}.", field=name
                )
        for name in params.processors:
            processor_target(name)
        if params.stop_strings and self._tokenizer is None:
            raise RequestError(
                "stop strings need a tokenizer, and this model has no tokenizer.json.", field="stop"
            )

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Bad words as token ids: at the beginning of a word, and within one or at a line's start.

        vLLM leaves the form with a space out where it has another number of tokens; here it counts.
        """
        if not params.bad_words:
            return params
        if self._tokenizer is None:
            raise RequestError(
                "bad_words need a tokenizer, and this model has no tokenizer.json.",
                field="bad_words",
            )
        sequences = list(params.bad_words_token_ids)
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False).tolist()
                if not ids:
                    raise RequestError(
                        f"bad_words has {word!r}, which this model's tokenizer turns into no "
                        "token.",
                        field="bad_words",
                    )
                sequences.append(tuple(ids))
        return replace(params, bad_words_token_ids=tuple(dict.fromkeys(sequences)))


def load_tokenizer_of(checked: CheckedArgs) -> Tokenizer | None:
    """None where the model's folder holds no tokenizer at all: token ids in, token ids out."""
    checkpoint = checked.checkpoint
    args = checked.args
    if args.tokenizer is not None:
        try:
            checkpoint = resolve_checkpoint(
                args.tokenizer, token=args.hf_token, load_format="dummy"
            )
        except ConfigError as error:
            raise ConfigError(f"tokenizer={args.tokenizer!r}: {error}") from None
    if checkpoint.format == "gguf":
        return load_tokenizer(read_gguf_header(checkpoint.files[0]).metadata)
    if not (checkpoint.folder / "tokenizer.json").exists() and args.tokenizer is None:
        return None
    return load_tokenizer(checkpoint.folder)


def check_can_chat(args: EngineArgs) -> None:
    """Raises, before a model is loaded, what every conversation with it would be refused by: that
    there is no tokenizer, or no chat template."""
    tokenizer = load_tokenizer_of(check(args))
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer.json; pass --tokenizer FOLDER.")
    load_template(args.chat_template, tokenizer).content_format()


def load_template(
    given: str | None, tokenizer: Tokenizer | None, *, content_format: ContentChoice = "auto"
) -> ChatTemplate:
    """given: a template's text or a file that holds it; None: the model's own. content_format: see
    ChatTemplate."""
    special = {} if tokenizer is None else tokenizer.special_tokens
    source: str | Mapping[str, str] | None = given
    if given is None:
        source = None if tokenizer is None else tokenizer.chat_templates
    elif "{" not in given:
        try:
            source = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template={given!r} is no Jinja template, and as a file cannot be read: "
                f"{reason_of(error)}."
            ) from None
    return ChatTemplate(source, special_tokens=special, content_format=content_format)
