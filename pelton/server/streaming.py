"""From the engine's deltas to chunks, and from chunks to whole answers.

This is one program: a streamed answer is the chunks, and an answer that is not streamed is the same
chunks joined. Nothing here waits for anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from pelton.engine.outputs import AnswerDelta, RequestDelta
from pelton.errors import RequestError
from pelton.sampling.logprobs import Logprob
from pelton.server.logprobs import (
    CompletionTokens,
    chat_logprobs,
    join_completion_logprobs,
    prompt_logprobs,
)
from pelton.server.prompts import ReadyPrompt
from pelton.server.protocol import (
    CachedTokens,
    ChatBody,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    GenerationBody,
    Message,
    PromptLogprobs,
    Usage,
)
from pelton.server.sampling import is_echo_alone
from pelton.tokens.tokenizer import Tokenizer

MadeChunk = TypeVar("MadeChunk", bound=msgspec.Struct, covariant=True)
TakenChunk = TypeVar("TakenChunk", bound=msgspec.Struct, contravariant=True)
Whole = TypeVar("Whole", bound=msgspec.Struct, covariant=True)
json_bytes = msgspec.json.Encoder().encode
"""JSON of an answer."""

DONE = b"data: [DONE]\n\n"


def event(chunk: Any) -> bytes:
    """A server-sent event (WHATWG HTML, 9.2) with `chunk` as JSON."""
    return b"data: " + json_bytes(chunk) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share. created: seconds since 1970."""

    id: str
    created: int
    model: str


class UsageCount:
    """Tokens of a request with one prompt or several, as they come."""

    def __init__(self, prompts: Sequence[ReadyPrompt]) -> None:
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_cached = [0] * len(prompts)
        self._num_tokens = 0

    def take(self, prompt: int, delta: RequestDelta) -> None:
        self._num_cached[prompt] = delta.num_cached_tokens
        for answer in delta.outputs:
            self._num_tokens += len(answer.token_ids)

    @property
    def usage(self) -> Usage:
        """Of all that was taken so far."""
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=self._num_prompt_tokens + self._num_tokens,
            prompt_tokens_details=CachedTokens(sum(self._num_cached)),
        )


class Chunker(Protocol[MadeChunk]):
    """Makes chunks of one request's deltas, in order."""

    def chunks(self, prompt: int, delta: RequestDelta) -> Sequence[MadeChunk]:
        """What `delta` adds to the answers to prompt number `prompt`; nothing for an answer that
        gets nothing to show."""
        ...

    def usage_chunk(self) -> MadeChunk:
        """The last chunk: usage, and no choices."""
        ...


class Joiner(Protocol[TakenChunk, Whole]):
    """Makes a whole answer of a request's chunks."""

    def add(self, chunk: TakenChunk) -> None:
        """In order; the usage chunk is the last one."""
        ...

    def whole(self) -> Whole: ...


class CompletionChunker:
    """Chunks of /v1/completions. Answer i to prompt p has index p * n + i."""

    def __init__(
        self,
        head: Head,
        body: CompletionBody,
        prompts: Sequence[ReadyPrompt],
        tokenizer: Tokenizer,
    ) -> None:
        self._head = head
        self._n = body.n or 1
        self._is_echo_alone = is_echo_alone(body)
        self._answers = [
            _CompletionAnswer(index, body, prompts[index // self._n], tokenizer)
            for index in range(self._n * len(prompts))
        ]
        self._count = UsageCount(prompts)
        self._shows_usage = _usage_in_chunks(body)

    def chunks(self, prompt: int, delta: RequestDelta) -> list[Completion]:
        if self._is_echo_alone:
            delta = replace(delta, outputs=[_without_tokens(answer) for answer in delta.outputs])
        self._count.take(prompt, delta)
        first = prompt * self._n
        if delta.prompt_logprobs is not None:
            for answer in self._answers[first : first + self._n]:
                answer.take_prompt_logprobs(delta.prompt_logprobs)
        choices = [self._answers[first + one.index].choice(one) for one in delta.outputs]
        return [self._chunk([choice]) for choice in choices if choice is not None]

    def usage_chunk(self) -> Completion:
        chunk = self._chunk([])
        chunk.usage = self._count.usage
        return chunk

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        head = self._head
        chunk = Completion(id=head.id, created=head.created, model=head.model, choices=choices)
        if self._shows_usage is not None:
            chunk.usage = self._count.usage if self._shows_usage else None
        return chunk


class _CompletionAnswer:
    """What has been shown of one answer."""

    def __init__(
        self, index: int, body: CompletionBody, prompt: ReadyPrompt, tokenizer: Tokenizer
    ) -> None:
        self._index = index
        self._prompt = prompt
        self._has_begun = False
        self._echo = ""
        self._echoed_logprobs: CompletionLogprobs | None = None
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._asks_prompt_logprobs = body.prompt_logprobs
        self._shows_ids = bool(body.return_token_ids)
        self._tokens: CompletionTokens | None = None
        skips_special = body.skip_special_tokens in (None, True)
        if body.logprobs is not None:
            hidden = tokenizer.special_token_ids if skips_special else frozenset[int]()
            self._tokens = CompletionTokens(tokenizer, body.logprobs, hidden)
        if body.echo:
            self._echo = prompt.text or tokenizer.decode(
                prompt.token_ids, skip_special_tokens=skips_special
            )

    def take_prompt_logprobs(self, entries: Sequence[Mapping[int, Logprob] | None]) -> None:
        """They come before the first token, or with it."""
        if self._asks_prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(
                entries, self._prompt.token_ids.tolist(), self._asks_prompt_logprobs
            )
        if self._echo and self._tokens is not None:
            self._echoed_logprobs = self._tokens.prompt(
                self._echo, self._prompt.token_ids.tolist(), entries
            )

    def choice(self, delta: AnswerDelta) -> CompletionChoice | None:
        logprobs = None
        if self._tokens is not None and delta.token_ids:
            logprobs = self._tokens.output(delta.token_ids, delta.logprobs or [])
        choice = CompletionChoice(
            index=self._index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._shows_ids:
            choice.token_ids = delta.token_ids
        if not self._has_begun:
            self._has_begun = True
            if self._begin(choice):
                return choice
        is_shown = delta.text or delta.finish_reason or logprobs is not None
        return choice if is_shown or (self._shows_ids and delta.token_ids) else None

    def _begin(self, choice: CompletionChoice) -> bool:
        """Adds what belongs to the prompt; returns whether there is any."""
        choice.text = self._echo + choice.text
        choice.prompt_logprobs = self._prompt_logprobs
        if (whole := self._echoed_logprobs) is not None:
            if choice.logprobs is not None:
                join_completion_logprobs(whole, choice.logprobs)
            choice.logprobs = whole
        if self._shows_ids:
            choice.prompt_token_ids = self._prompt.token_ids.tolist()
        return bool(self._echo) or self._shows_ids or self._prompt_logprobs is not UNSET


def _without_tokens(delta: AnswerDelta) -> AnswerDelta:
    """The engine makes one token at least; whoever wants the prompt alone does not get it."""
    return AnswerDelta(delta.index, finish_reason=delta.finish_reason, error=delta.error)


def _usage_in_chunks(body: GenerationBody) -> bool | None:
    """None: no word of usage; False: null, as OpenAI has it before a usage chunk; True: the numbers
    so far."""
    options = body.stream_options
    if options is None or not options.include_usage:
        return None
    return bool(options.continuous_usage_stats)


class CompletionJoiner:
    """Makes one `Completion` of chunks, which are its own from then on."""

    def __init__(self) -> None:
        self._whole: Completion | None = None
        self._texts: dict[int, list[str]] = {}
        self._choices: dict[int, CompletionChoice] = {}

    def add(self, chunk: Completion) -> None:
        for choice in chunk.choices:
            known = self._choices.get(choice.index)
            if known is None:
                self._choices[choice.index] = choice
                self._texts[choice.index] = [choice.text]
                continue
            self._texts[choice.index].append(choice.text)
            if known.logprobs is None:
                known.logprobs = choice.logprobs
            elif choice.logprobs is not None:
                join_completion_logprobs(known.logprobs, choice.logprobs)
            if known.token_ids is not UNSET and choice.token_ids is not UNSET:
                known.token_ids += choice.token_ids
            known.finish_reason = choice.finish_reason
            known.stop_reason = choice.stop_reason
        self._whole = chunk

    def whole(self) -> Completion:
        assert self._whole is not None, "no chunk came"
        whole = self._whole
        whole.choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in whole.choices:
            choice.text = "".join(self._texts[choice.index])
        return whole


class ChatChunker:
    """Chunks of /v1/chat/completions; each answer begins with one that tells the role."""

    def __init__(
        self, head: Head, body: ChatBody, prompt: ReadyPrompt, tokenizer: Tokenizer
    ) -> None:
        self._head = head
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._begins_with = _continued_text(body)
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        self._asks_prompt_logprobs = body.prompt_logprobs
        self._shows_ids = bool(body.return_token_ids)
        self._count = UsageCount([prompt])
        self._shows_usage = _usage_in_chunks(body)

    def chunks(self, prompt: int, delta: RequestDelta) -> list[ChatChunk]:
        self._count.take(prompt, delta)
        found = []
        for answer in delta.outputs:
            if answer.index not in self._begun:
                found.append(self._first(answer.index, delta))
            choice = self._choice(answer)
            if choice is not None:
                found.append(self._chunk([choice]))
        return found

    def usage_chunk(self) -> ChatChunk:
        chunk = self._chunk([])
        chunk.usage = self._count.usage
        return chunk

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        head = self._head
        chunk = ChatChunk(id=head.id, created=head.created, model=head.model, choices=choices)
        if self._shows_usage is not None:
            chunk.usage = self._count.usage if self._shows_usage else None
        return chunk

    def _first(self, index: int, delta: RequestDelta) -> ChatChunk:
        message = Message(role="assistant", content=self._begins_with)
        choice = ChatChunkChoice(index=index, delta=message, logprobs=None, finish_reason=None)
        chunk = self._chunk([choice])
        if not self._begun:
            if self._shows_ids:
                chunk.prompt_token_ids = self._prompt.token_ids.tolist()
            if delta.prompt_logprobs is not None and self._asks_prompt_logprobs is not None:
                chunk.prompt_logprobs = prompt_logprobs(
                    delta.prompt_logprobs,
                    self._prompt.token_ids.tolist(),
                    self._asks_prompt_logprobs,
                )
        self._begun.add(index)
        return chunk

    def _choice(self, answer: AnswerDelta) -> ChatChunkChoice | None:
        logprobs = None
        if self._num_top is not None and answer.token_ids:
            logprobs = chat_logprobs(
                answer.token_ids, answer.logprobs or [], self._num_top, self._tokenizer
            )
        shows_ids = self._shows_ids and bool(answer.token_ids)
        if not (answer.text or answer.finish_reason or logprobs or shows_ids):
            return None
        choice = ChatChunkChoice(
            index=answer.index,
            delta=Message(content=answer.text) if answer.text else Message(),
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
        )
        if answer.finish_reason is not None:
            choice.stop_reason = answer.stop_reason
        if shows_ids:
            choice.token_ids = answer.token_ids
        return choice


def _continued_text(body: ChatBody) -> str:
    """What an echoing answer begins with: the text of the message that it continues."""
    if not body.echo:
        return ""
    if not body.continue_final_message:
        raise RequestError(
            "echo needs continue_final_message=true in a chat: the answer then begins with the "
            "message that it continues.",
            field="echo",
        )
    message = body.messages[-1]
    content = message.get("content")
    if content is None:
        content = message.get("refusal")
    if isinstance(content, str):
        return content
    return "".join(part[part["type"]] for part in content or [])


class ChatJoiner:
    """Makes a `ChatCompletion` of chunks."""

    def __init__(self) -> None:
        self._first: ChatChunk | None = None
        self._usage: Usage | None = None
        self._texts: dict[int, list[str]] = {}
        self._choices: dict[int, ChatChoice] = {}

    def add(self, chunk: ChatChunk) -> None:
        if self._first is None:
            self._first = chunk
        for choice in chunk.choices:
            known = self._choices.get(choice.index)
            if known is None:
                known = self._choices[choice.index] = ChatChoice(
                    index=choice.index,
                    message=Message(role=choice.delta.role),
                    logprobs=None,
                    finish_reason=None,
                    stop_reason=None,
                )
                self._texts[choice.index] = []
            _add_chat_choice(known, choice)
            if choice.delta.content is not UNSET:
                self._texts[choice.index].append(choice.delta.content)
        if chunk.usage is not UNSET:
            self._usage = chunk.usage

    def whole(self) -> ChatCompletion:
        first = self._first
        assert first is not None, "no chunk came"
        assert self._usage is not None, "no usage chunk came"
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            choice.message.content = "".join(self._texts[choice.index])
        return ChatCompletion(
            id=first.id,
            created=first.created,
            model=first.model,
            choices=choices,
            usage=self._usage,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
        )


def _add_chat_choice(known: ChatChoice, choice: ChatChunkChoice) -> None:
    if choice.logprobs is not None:
        if known.logprobs is None:
            known.logprobs = ChatLogprobs(content=[])
        known.logprobs.content += choice.logprobs.content
    if choice.token_ids is not UNSET:
        if known.token_ids is UNSET:
            known.token_ids = []
        known.token_ids += choice.token_ids
    if choice.finish_reason is not None:
        known.finish_reason = choice.finish_reason
        known.stop_reason = None if choice.stop_reason is UNSET else choice.stop_reason
