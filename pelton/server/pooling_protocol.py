"""Bodies and answers of the endpoints that pool: OpenAI's embeddings, vLLM's pooling, classify and
score, and rerank as Jina and Cohere have it. As in `protocol.py`, None means "not given"."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from pelton.server.protocol import CachedTokens, Embeds, Prompt

Encoding = Literal["float", "base64"]
Texts = str | list[str]

ALIASES: dict[str, tuple[str, ...]] = {
    "/pooling": ("/v1/pooling",),
    "/classify": ("/v1/classify",),
    "/score": ("/v1/score",),
    "/rerank": ("/v1/rerank", "/v2/rerank"),
}
"""Other paths to the endpoints that pool."""


class PooledBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """What all ways to pool take.

    model: a served name; may be left out.
    truncate_prompt_tokens: cut longer inputs to their first so many tokens; -1 = to the model's
        length. Without it they are refused.
    priority: lower is served first, with --scheduling-policy priority.
    request_id: shown in logs and in the answer's X-Request-Id, as the header of that name.
    cache_salt: requests with different salts share no cached prefix.
    user: whom the request is for; shown in the log.
    """

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None


class InputBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """input: text, or token ids, or a list of either; each item gets a result of its own.
    prompt_embeds: instead of input.
    use_activation: whether vectors get length 1, and scores of classes become probabilities; as the
        model says unless given.
    """

    input: Prompt | None = None
    prompt_embeds: Embeds | None = None
    use_activation: bool | None = None


class EmbeddingBody(InputBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings.

    encoding_format: float for lists of numbers, which it is unless given, or base64 for that of
        float32 numbers in little-endian order.
    dimensions: numbers of each vector; the first so many are kept. All unless given.
    """

    encoding_format: Encoding | None = None
    dimensions: int | None = None


class PoolingBody(EmbeddingBody, kw_only=True, forbid_unknown_fields=True):
    """POST /pooling.

    encoding_format: float for lists of numbers, which it is unless given, or base64 for that of
        float32 numbers in little-endian order, row by row, with their shape beside.
    task: embed, classify, token_embed or token_classify; what the model is for unless given.
    method: which hidden states are taken: last, cls or mean, and for tasks of tokens all or step;
        the model's unless given.
    step_tag_id: of method step: the token whose places are taken.
    returned_token_ids: of method step: which columns of the result.
    """

    task: str | None = None
    method: str | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


class ClassifyBody(InputBody, kw_only=True, forbid_unknown_fields=True):
    """POST /classify."""


class ScoreBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """POST /score: two texts, one text with each of several, or each of some with its own.

    text_1 / text_2: what is compared.
    queries / documents: other names for the same.
    data_1 / data_2: other names for the same.
    use_activation: whether a classifier's score becomes a probability; as the model says unless
        given. Makes no difference to vectors' cosine.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    use_activation: bool | None = None


class RerankBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """POST /rerank.

    query: what documents are to be relevant to.
    documents: texts, or objects with text.
    top_n: tell the best so many; all unless given.
    return_documents: tell their texts, too; true unless given.
    use_activation: whether a classifier's score becomes a probability; as the model says unless
        given. Makes no difference to vectors' cosine.
    """

    query: str
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1)]
    top_n: int | None = None
    return_documents: bool | None = None
    use_activation: bool | None = None


class PoolingUsage(Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Embedding(Struct, frozen=True, kw_only=True):
    """embedding: numbers, or their base64. index: of the input."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """Answer of /v1/embeddings."""

    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Pooled(Struct, frozen=True, kw_only=True):
    """data: of a text, or a list for each of its tokens; or base64. shape: of what is in base64."""

    index: int
    data: list[float | list[float]] | str
    shape: list[int] | UnsetType = UNSET
    object: Literal["pooling"] = "pooling"


class PooledList(Struct, frozen=True, kw_only=True):
    """Answer of /pooling."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Classes(Struct, frozen=True, kw_only=True):
    """probs: of each class; label: the name of the likeliest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassesList(Struct, frozen=True, kw_only=True):
    """Answer of /classify."""

    id: str
    created: int
    model: str
    data: list[Classes]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Score(Struct, frozen=True, kw_only=True):
    """score: of a pair; higher is better."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True, kw_only=True):
    """Answer of /score."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    object: Literal["list"] = "list"


class Document(Struct, frozen=True):
    """text: as it was sent."""

    text: str


class Relevance(Struct, frozen=True, kw_only=True):
    """index: of the document among those that were sent."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class Ranking(Struct, frozen=True, kw_only=True):
    """Answer of /rerank: the most relevant first."""

    id: str
    model: str
    results: list[Relevance]
    usage: PoolingUsage
