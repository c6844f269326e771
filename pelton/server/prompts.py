"""From a request's prompt or messages to token ids. Long ones are worked on beside the loop."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pelton.config.params import MAX_N
from pelton.core.prompt_embeds import PromptEmbeds
from pelton.engine.prompt_embeds import read_prompt_embeds
from pelton.engine.prompts import Prompt
from pelton.errors import RequestError
from pelton.server.bodies import beside_loop
from pelton.server.errors import ApiError
from pelton.server.protocol import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from pelton.server.sampling import asked_tokens
from pelton.tokens.byte_bound import lost_bytes, max_bytes_per_token
from pelton.tokens.chat_template import ChatTemplate
from pelton.tokens.tokenizer import Tokenizer

TokenIds = npt.NDArray[np.int32]

_MAX_CHARACTERS = 2**20
_MAX_PER_TOKEN = 16
"""Of a text that is tokenized: so many, or so many per token of the context if that is more. What a
million tokens come as is one list, and everybody waits while it is made."""

_MAX_UTF8 = 4  # bytes of a character
_SMALL_TEXT = 2000  # characters that are tokenized sooner than another thread would wake up
_TEMPLATE_WORDS = ("self", "messages", "tools", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True, slots=True)
class ReadyPrompt:
    """token_ids: [prompt_len], -1 where an embedding stands. text: what was sent or rendered; None
    if ids or embeddings were sent."""

    token_ids: TokenIds
    text: str | None
    embeds: PromptEmbeds | None = None

    @property
    def for_engine(self) -> Prompt:
        if self.embeds is not None:
            return {"prompt_embeds": self.embeds}
        return {"prompt_token_ids": self.token_ids}


class PromptReader:
    """Makes prompts of requests' bodies.

    Args:
        tokenizer, template: the model's.
        vocab_size: ids are in [0, vocab_size).
        max_model_len: tokens that prompt and answer may have together.
        pool: threads for long work.
        trusts_templates: whether requests may bring chat templates.
        takes_embeds: whether they may bring embeddings.

    max_characters: of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        vocab_size: int,
        max_model_len: int,
        pool: Executor,
        trusts_templates: bool = False,
        takes_embeds: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._pool = pool
        self._trusts_templates = trusts_templates
        self._takes_embeds = takes_embeds
        self.max_characters = max(_MAX_CHARACTERS, _MAX_PER_TOKEN * max_model_len)
        width = max_bytes_per_token(tokenizer)
        # The tokenizer counts its vocabulary, 0.1 s, when it is asked first: not by a request.
        _ = tokenizer.vocab_size
        self._max_bytes = None if width is None else width * max_model_len
        self._lost_bytes = b"" if width is None else lost_bytes(tokenizer)

    async def completion(self, body: CompletionBody) -> list[ReadyPrompt]:
        """One prompt or several, in order. Raises RequestError, or ApiError with OpenAI's code for
        one that is too long."""
        given = body.prompt
        is_small = isinstance(given, str) and len(given) <= _SMALL_TEXT
        is_small = is_small and body.prompt_embeds is None
        return await beside_loop(self._pool, is_small, self._completion, body)

    def _completion(self, body: CompletionBody) -> list[ReadyPrompt]:
        if body.prompt_embeds is not None:
            return [self._with_room(prompt, body) for prompt in self._embedded(body)]
        if body.prompt is None:
            raise RequestError("prompt is missing.", field="prompt")
        adds = True if body.add_special_tokens is None else body.add_special_tokens
        keep = self._kept(body)
        prompts = as_prompts(body.prompt, "prompt", MAX_N)
        return [self._with_room(self._ready(prompt, adds, keep), body) for prompt in prompts]

    def _embedded(self, body: CompletionBody) -> list[ReadyPrompt]:
        if body.prompt is not None:
            raise RequestError(
                "prompt and prompt_embeds exclude each other; leave one of them out.",
                field="prompt",
            )
        for name in ("echo", "truncate_prompt_tokens", "add_special_tokens"):
            # echo=false asks for nothing.
            if getattr(body, name) not in (None, False if name == "echo" else None):
                raise RequestError(f"{name} is for prompts of text, not prompt_embeds.", field=name)
        assert body.prompt_embeds is not None
        return [
            ReadyPrompt(np.full(len(embeds), -1, np.int32), None, embeds)
            for embeds in self.embeds(body.prompt_embeds, MAX_N)
        ]

    def embeds(self, given: str | list[str], most: int) -> list[PromptEmbeds]:
        """A body's prompt_embeds, `most` at most. Raises RequestError, with the place of one of a
        list."""
        if not self._takes_embeds:
            raise RequestError(
                "prompt_embeds are only read if the server was started with "
                "--enable-prompt-embeds.",
                field="prompt_embeds",
            )
        if isinstance(given, str):
            return [_decoded(given)]
        if not 1 <= len(given) <= most:
            raise RequestError(
                f"prompt_embeds may hold 1 to {most} prompts, got {len(given)}.",
                field="prompt_embeds",
            )
        return [_decoded(one, f"prompt_embeds[{at}]: ") for at, one in enumerate(given)]

    async def chat(self, body: ChatBody) -> ReadyPrompt:
        """The conversation, rendered by the chat template. Always beside the loop: a template may
        run for seconds, whatever it is given."""
        return await beside_loop(self._pool, False, self._chat, body)

    def _chat(self, body: ChatBody) -> ReadyPrompt:
        keep = self._kept(body)
        # The template writes BOS itself.
        prompt = self._ready(self._render(body), bool(body.add_special_tokens), keep)
        return self._with_room(prompt, body)

    async def tokens(self, body: TokenizeBody) -> list[int]:
        """For /tokenize: of any length."""
        return await beside_loop(self._pool, False, self._tokens, body)

    def _tokens(self, body: TokenizeBody) -> list[int]:
        if (body.prompt is None) == (body.messages is None):
            got = "none" if body.prompt is None else "both"
            raise RequestError(
                f"The body must have one of prompt and messages, got {got}.", field="prompt"
            )
        adds, text = body.add_special_tokens, body.prompt
        if text is None:
            text, adds = self._render(body), bool(adds)
        ids: list[int] = self._encode(text, True if adds is None else adds).tolist()
        return ids

    def _with_room(self, prompt: ReadyPrompt, body: GenerationBody) -> ReadyPrompt:
        """Raises ApiError if the answer may be longer than what the context has left; what is not
        asked for is cut to it."""
        name, asked = asked_tokens(body)
        length = len(prompt.token_ids)
        if length >= self._max_model_len:
            raise ApiError(
                400,
                f"The prompt has {length} embeddings, and must be shorter than max_model_len="
                f"{self._max_model_len}; shorten it.",
                param="prompt_embeds",
                code="context_length_exceeded",
            )
        if asked is not None and length + asked > self._max_model_len:
            raise ApiError(
                400,
                f"The prompt has {length} tokens and {name}={asked}, together {length + asked}; "
                f"the context holds max_model_len={self._max_model_len}. Ask for at most "
                f"{self._max_model_len - length}, or shorten the prompt.",
                param=name,
                code="context_length_exceeded",
            )
        return prompt

    def _kept(self, body: GenerationBody) -> int | None:
        """Tokens of the prompt that are kept, counted from its end."""
        truncate = body.truncate_prompt_tokens
        if truncate is None:
            return None
        if truncate == -1:
            # Too large a max_tokens is refused by itself.
            return max(1, self._max_model_len - max(1, asked_tokens(body)[1] or 1))
        if not 1 <= truncate < self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or between 1 and {self._max_model_len - 1}, "
                f"got {truncate}.",
                field="truncate_prompt_tokens",
            )
        return truncate

    def _ready(self, prompt: str | Sequence[int], adds: bool, keep: int | None) -> ReadyPrompt:
        if isinstance(prompt, str):
            ids, text = self._encode_short(prompt, adds, keep), prompt
        else:
            if keep is not None:
                prompt = prompt[-keep:]
            elif len(prompt) >= self._max_model_len:
                raise self._too_long(str(len(prompt)))
            ids, text = self._check_ids(prompt), None
        if keep is not None and len(ids) > keep:
            ids, text = ids[-keep:], None
        if len(ids) >= self._max_model_len:
            raise self._too_long(str(len(ids)))
        if len(ids) == 0:
            raise RequestError("prompt must have at least 1 token, got none.", field="prompt")
        return ReadyPrompt(ids, text)

    def _encode_short(self, text: str, adds: bool, keep: int | None) -> TokenIds:
        """Refuses a text that is surely too long by its bytes before it takes time to tokenize
        it."""
        if (
            keep is None
            and self._max_bytes is not None
            and len(text) > self._max_bytes // _MAX_UTF8
            and len(text.encode().translate(None, self._lost_bytes)) > self._max_bytes
        ):
            raise self._too_long(f"at least {self._max_model_len}")
        return self._encode(text, adds)

    def _encode(self, text: str, adds: bool) -> TokenIds:
        if len(text) > self.max_characters:
            raise RequestError(
                f"prompt may have {self.max_characters} characters, got {len(text)}.",
                field="prompt",
            )
        return self.tokenizer.encode(text, add_special_tokens=adds)

    def _too_long(self, length: str) -> ApiError:
        return ApiError(
            400,
            f"The prompt has {length} tokens, and must be shorter than max_model_len="
            f"{self._max_model_len}; shorten it, or set truncate_prompt_tokens.",
            param="prompt",
            code="context_length_exceeded",
        )

    def _check_ids(self, ids: Sequence[int]) -> TokenIds:
        low, high = min(ids, default=0), max(ids, default=0)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"prompt holds token id {low if low < 0 else high}; the model's vocabulary has ids "
                f"from 0 to {self._vocab_size - 1}.",
                field="prompt",
            )
        return np.array(ids, dtype=np.int32)

    def _render(self, body: ChatBody | TokenizeBody) -> str:
        template = self._template
        if body.chat_template is not None:
            template = self._brought(body.chat_template)
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        for name in _TEMPLATE_WORDS:
            if name in variables:
                raise RequestError(
                    f"chat_template_kwargs may not hold {name!r}: the template's variable of that "
                    "name is set otherwise.",
                    field="chat_template_kwargs",
                )
        if body.documents is not None:
            variables["documents"] = body.documents
        continues = bool(body.continue_final_message)
        adds = body.add_generation_prompt
        assert body.messages is not None
        return template.render(
            body.messages,
            add_generation_prompt=not continues if adds is None else adds,
            continue_final_message=continues,
            **variables,
        )

    def _brought(self, source: str) -> ChatTemplate:
        if not self._trusts_templates:
            raise RequestError(
                "chat_template in a request is only read if the server was started with "
                "--trust-request-chat-template.",
                field="chat_template",
            )
        try:
            return ChatTemplate(source, special_tokens=self.tokenizer.special_tokens)
        except ValueError as error:
            raise RequestError(str(error), field="chat_template") from None


def _decoded(text: str, place: str = "") -> PromptEmbeds:
    """place: what a refusal begins with."""
    try:
        return read_prompt_embeds(base64.b64decode(text, validate=True))
    except RequestError as error:
        reason = str(error)
    except ValueError as error:
        reason = f"prompt_embeds must be base64 of a safetensors file: {error}."
    raise RequestError(f"{place}{reason}", field="prompt_embeds")


def as_prompts(
    given: str | list[str | int | list[int]], name: str, most: int
) -> list[str | list[int]]:
    """A field's texts or lists of token ids, `most` at most. Raises RequestError under its name."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError(f"{name} must not be empty.", field=name)
    if all(type(item) is int for item in given):
        return [given]  # type: ignore[list-item]
    if len(given) > most:
        raise RequestError(f"{name} may hold {most} prompts, got {len(given)}.", field=name)
    kind = type(given[0])
    if kind is int or any(type(item) is not kind for item in given):
        raise RequestError(
            f"{name} must be a string, token ids, or a list of one of these and not of both.",
            field=name,
        )
    return given  # type: ignore[return-value]
