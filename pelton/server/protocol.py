"""Bodies of requests and answers, in OpenAI's shapes with vLLM's extra fields.

None as a request field's value means "not given"; what then holds stands in `sampling.py`. A field
that no type here has is refused by name unless it is null, and so is one that is known and not
supported yet (`UNSUPPORTED`): nothing that a client asks for is ignored. The OpenAPI document tells
of each field what the docstrings say here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pelton.errors import RequestError

Prompt = Annotated[
    str | list[str | int | list[int]],
    Meta(
        description="Text, or token ids, or a list of either.",
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        },
    ),
]
Embeds = Annotated[
    str | list[str],
    Meta(
        description="Embeddings in place of token ids: base64 of a safetensors file that holds one "
        "tensor [T, H], or a list of these; with --enable-prompt-embeds.",
    ),
]
LogitBias = Annotated[dict[str, float], Meta(description="Token id -> bias in [-100, 100].")]
Messages = Annotated[
    list[dict[str, Any]],
    Meta(
        min_length=1,
        description="The conversation: role, and content as text or as a list of text parts.",
        extra_json_schema={
            "items": {
                "type": "object",
                "properties": {"role": {"type": "string", "minLength": 1}, "content": {}},
                "required": ["role"],
            }
        },
    ),
]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells beside its text.

    include_usage: one more chunk at the end, with usage and without choices.
    continuous_usage_stats: usage so far in every chunk.
    include_obfuscation: nothing here hides how long tokens are: only false, or leave it out.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What both ways to generate take: see `SamplingParams` for sampling fields.

    model: a served name; may be left out.
    stream: send events as the answer is made.
    stream_options: with stream.
    seed: of the noise that draws tokens. Same seed, same answer if the server runs with
        --batch-invariant; without it nearly always, since what else runs, and a cached prefix,
        change the last bits of the logits.
    max_tokens / max_completion_tokens: most tokens of an answer. With the prompt's they must fit
        the context.
    truncate_prompt_tokens: keep the last so many tokens of the prompt; -1 = what the context holds
        beside max_tokens.
    prompt_logprobs: the prompt tokens' log-probabilities, and of so many alternatives.
    priority: lower is served first, with --scheduling-policy priority.
    request_id: shown in logs and in the answer's X-Request-Id, as the header of that name.
    cache_salt: requests with different salts share no cached prefix.
    add_special_tokens: let the tokenizer add its own, such as a token for the beginning; true for
        completions, false for chats, whose template writes them.
    return_token_ids: prompt_token_ids, -1 where an embedding stands, and token_ids in the answer.
    user / safety_identifier: whom the request is for; shown in the log.
    metadata: of what OpenAI stores; nothing is stored here, so it makes no difference.
    prompt_cache_key: where OpenAI looks for prefixes; they are found without it, so it makes no
        difference.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    # Known, and refused unless neutral: see UNSUPPORTED.
    best_of: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    logits_processors: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    thinking_token_budget: Any = None
    return_tokens_as_token_ids: Any = None
    store: Any = None
    service_tier: Any = None


class CompletionBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions.

    prompt: text, or token ids, or a list of either; each has answers of its own.
    max_tokens: most tokens of an answer; 16 unless given. 0 is possible with echo.
    logprobs: log-probabilities of the tokens, and of so many alternatives each.
    echo: the text begins with the prompt's.
    prompt_embeds: instead of prompt, which then is null or left out.
    """

    prompt: Prompt | None = None
    prompt_embeds: Embeds | None = None
    logprobs: int | None = None
    suffix: Any = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions.

    max_tokens / max_completion_tokens: most tokens of an answer; the rest of the context unless
        given.
    logprobs: log-probabilities of the tokens.
    top_logprobs: of so many alternatives each, with logprobs.
    echo: with continue_final_message, the answer begins with the message that it continues.
    add_generation_prompt: end the prompt with the beginning of an answer; true unless a message is
        continued.
    continue_final_message: the answer goes on with the last message.
    documents / chat_template_kwargs: variables of the chat template.
    chat_template: instead of the model's own; with --trust-request-chat-template.
    """

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    reasoning_effort: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    moderation: Any = None


@dataclass(frozen=True, slots=True)
class Unsupported:
    """neutral: values that ask for nothing. hint: what to do instead, as the end of a sentence."""

    neutral: tuple[Any, ...]
    hint: str = "leave it out"


UNSUPPORTED: dict[str, Unsupported] = {
    "best_of": Unsupported((None, 1), "use n, and choose among the answers"),
    "response_format": Unsupported((None, {"type": "text"})),
    "structured_outputs": Unsupported((None,)),
    "logits_processors": Unsupported((None, [])),
    "use_beam_search": Unsupported((None, False)),
    "length_penalty": Unsupported((None, 1, 1.0)),
    "spaces_between_special_tokens": Unsupported((None, True)),
    "thinking_token_budget": Unsupported((None,)),
    "return_tokens_as_token_ids": Unsupported((None, False), "use return_token_ids"),
    "store": Unsupported((None, False), "nothing is stored here; leave it out"),
    "service_tier": Unsupported((None, "auto", "default")),
    "suffix": Unsupported((None, "")),
    "tools": Unsupported((None, [])),
    "tool_choice": Unsupported((None, "none")),
    "parallel_tool_calls": Unsupported((None, True, False)),
    "functions": Unsupported((None, [])),
    "function_call": Unsupported((None, "none")),
    "reasoning_effort": Unsupported(
        (None,), "a template that knows it takes it in chat_template_kwargs"
    ),
    "modalities": Unsupported((None, ["text"])),
    "audio": Unsupported((None,)),
    "prediction": Unsupported((None,)),
    "verbosity": Unsupported((None, "medium"), "say in the messages how long an answer should be"),
    "web_search_options": Unsupported((None,)),
    "prompt_cache_retention": Unsupported(
        (None, "in_memory"), "a prefix is kept as long as there is room"
    ),
    "prompt_cache_options": Unsupported(
        (None, {}, {"mode": "implicit"}), "shared prefixes are found by themselves"
    ),
    "moderation": Unsupported((None,)),
}


def refuse_unsupported(body: GenerationBody) -> None:
    """Raises RequestError for a field that is known, given, and not supported."""
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation is not supported by this version of Pelton: set it "
            "to false, or leave it out; got true.",
            field="stream_options.include_obfuscation",
        )
    for name, rule in UNSUPPORTED.items():
        value = getattr(body, name, None)
        # Booleans first, because 1 == True.
        if not any(type(value) is type(neutral) and value == neutral for neutral in rule.neutral):
            shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:60] + "..."
            raise RequestError(
                f"{name} is not supported by this version of Pelton: {rule.hint}; got {shown}.",
                field=name,
            )


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize.

    model: a served name; may be left out.
    prompt: text; or give messages.
    messages: a conversation, rendered as for a chat, with that one's fields.
    add_special_tokens: let the tokenizer add its own; true for a prompt, false for messages.
    return_token_strs: the tokens' texts, too.
    """

    model: str | None = None
    prompt: str | None = None
    return_token_strs: bool | None = None
    # As ChatBody has them (structs have one base), of which a test sees to it.
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize.

    tokens: token ids.
    model: a served name; may be left out.
    """

    tokens: list[int]
    model: str | None = None


class Tokens(Struct, frozen=True, kw_only=True):
    """Answer of /tokenize. max_model_len: tokens that prompt and answer may have together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct, frozen=True, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


class CachedTokens(Struct, frozen=True):
    """cached_tokens: tokens of the prompt that the prefix cache provided."""

    cached_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """In tokens. prompt_tokens counts each prompt once, whatever n is; completion_tokens counts
    those of all answers, with end tokens and those of stop strings."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptToken(Struct, frozen=True, kw_only=True):
    """One possibility for a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptToken] | None]
"""Per token of the prompt: token id -> it; None for the first token."""


class CompletionLogprobs(Struct, kw_only=True):
    """Of the tokens of a text, in order; None where no token comes before. text_offset: characters
    of the text before each token. top_logprobs: token -> value, if alternatives were asked for."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """What a chunk adds to one answer, or one answer whole."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """Answer of /v1/completions: a chunk of a stream or all of it."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct, frozen=True, kw_only=True):
    """bytes: UTF-8 of the token, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True, kw_only=True):
    """One token of an answer. top_logprobs: the most likely ones, best first."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Of the tokens of a message, in order."""

    content: list[TokenLogprob]


class Message(Struct, kw_only=True):
    """A model's message, or what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """What a chunk adds to one answer."""

    index: int
    delta: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, kw_only=True):
    """An event of a streamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """root: the checkpoint. max_model_len: tokens that prompt and answer may have together."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "pelton"


class ModelList(Struct, frozen=True, kw_only=True):
    """Answer of /v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Load(Struct, frozen=True, kw_only=True):
    """Answer of /load: requests now. server_load: all that have not been answered."""

    server_load: int
    num_requests_running: int
    num_requests_waiting: int


class Stats(Struct, frozen=True, kw_only=True):
    """Answer of /stats: what the page draws. Gauges of now, counts since the start, and a clock to
    make rates of them. kv_cache_usage: share; num_kv_tokens: what the whole KV cache holds.
    first_token_seconds: of all `first_tokens` requests that have got one."""

    version: str
    model: str
    max_model_len: int
    max_num_seqs: int
    num_kv_tokens: int
    is_alive: bool
    uptime_seconds: float
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    first_tokens: int
    first_token_seconds: float


class Health(Struct, frozen=True):
    """Answer of /health while the engine runs."""

    status: Literal["ok"] = "ok"


class Version(Struct, frozen=True):
    """Answer of /version."""

    version: str
