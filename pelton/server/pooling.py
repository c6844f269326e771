"""Pooling with one model, without HTTP: from a request's body to its answer."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pelton.config.engine import EngineConfig
from pelton.config.pooling import PoolingParams
from pelton.core.plan import Float32Array
from pelton.engine.facts import EngineFacts
from pelton.engine.outputs import PoolingOutput, PoolingRequestOutput
from pelton.engine.prompts import Prompt
from pelton.engine.scores import as_pair_prompt, pair_up, scores_pairs, similarity
from pelton.errors import EngineBusy, RequestError
from pelton.server.bodies import beside_loop
from pelton.server.errors import ApiError
from pelton.server.pooling_protocol import (
    Classes,
    ClassesList,
    ClassifyBody,
    Document,
    Embedding,
    EmbeddingBody,
    EmbeddingList,
    InputBody,
    Pooled,
    PooledBody,
    PooledList,
    PoolingBody,
    PoolingUsage,
    Ranking,
    Relevance,
    RerankBody,
    Score,
    ScoreBody,
    ScoreList,
)
from pelton.server.prompts import PromptReader, as_prompts
from pelton.server.protocol import CachedTokens
from pelton.server.streaming import json_bytes

MAX_INPUTS = 2048
"""Of a request; OpenAI's limit."""

_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
_SMALL = 2000  # numbers of an answer that are written sooner than another thread would wake up
_OF_PROMPTS = ("prompt", "prompt_token_ids", "prompt_embeds")

Output = PoolingRequestOutput[PoolingOutput]
Made = TypeVar("Made")


class Engine(Protocol):
    """What is asked of an `AsyncLLM`."""

    config: EngineConfig
    facts: EngineFacts

    async def pool(
        self,
        prompt: Prompt,
        params: PoolingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Output: ...


class PoolingWatch:
    """Is told what happens to a request. This one does not care."""

    def begin(self, request_id: str, num_prompts: int) -> None:
        """Its prompts go to the engine under `request_id`."""

    def take(self, output: Output) -> None:
        """A prompt's result has come."""

    def end(self, error: BaseException | None) -> None:
        """All have, or it failed or was given up; once if it began."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """place: what the client calls the prompt, and field its field."""

    prompt: Prompt
    field: str
    place: str


class PoolingService:
    """Embeddings, classes and scores of one model; each method answers a body with JSON.

    They raise RequestError or ApiError for what is wrong with it, and the engine's faults.

    Args:
        engine: runs it.
        check_model: raises for a name that is not served.
        name: of the model, in answers.
        reader: says how long a text may be, and reads embeddings.
        pool: threads for long work.
    """

    def __init__(
        self,
        engine: Engine,
        check_model: Callable[[str | None], None],
        reader: PromptReader,
        *,
        name: str,
        pool: Executor,
    ) -> None:
        self._engine = engine
        self._check_model = check_model
        self._name = name
        self._reader = reader
        # So many that the next step is always full.
        self._max_running = 2 * engine.facts.max_num_seqs
        self._pool = pool

    async def embed(self, body: EmbeddingBody, watch: PoolingWatch) -> bytes:
        """POST /v1/embeddings."""
        params = self._params(body, task="embed", dimensions=body.dimensions)
        head, outputs = await self._run("embd", await self._inputs(body), params, body, watch)
        as_text = body.encoding_format == "base64"

        def made() -> EmbeddingList:
            data = [
                Embedding(index=index, embedding=_base64(one) if as_text else one.tolist())
                for index, one in enumerate(_arrays(outputs))
            ]
            return EmbeddingList(**head, data=data, usage=_usage(outputs))

        return await self._written(outputs, made)

    async def pooled(self, body: PoolingBody, watch: PoolingWatch) -> bytes:
        """POST /pooling."""
        params = self._params(
            body,
            task=body.task,
            method=body.method,
            dimensions=body.dimensions,
            step_tag_id=body.step_tag_id,
            returned_token_ids=body.returned_token_ids,
        )
        head, outputs = await self._run("pool", await self._inputs(body), params, body, watch)

        def made() -> PooledList:
            data = []
            for index, one in enumerate(_arrays(outputs)):
                if body.encoding_format == "base64":
                    shape = list(one.shape)
                    data.append(Pooled(index=index, data=_base64(one), shape=shape))
                else:
                    data.append(Pooled(index=index, data=one.tolist()))
            return PooledList(**head, data=data, usage=_usage(outputs))

        return await self._written(outputs, made)

    async def classify(self, body: ClassifyBody, watch: PoolingWatch) -> bytes:
        """POST /classify."""
        params = self._params(body, task="classify")
        head, outputs = await self._run("clas", await self._inputs(body), params, body, watch)

        def made() -> ClassesList:
            data = [
                Classes(
                    index=index,
                    label=f"LABEL_{int(one.argmax())}",
                    probs=one.tolist(),
                    num_classes=len(one),
                )
                for index, one in enumerate(_arrays(outputs))
            ]
            return ClassesList(**head, data=data, usage=_usage(outputs))

        return await self._written(outputs, made)

    async def score(self, body: ScoreBody, watch: PoolingWatch) -> bytes:
        """POST /score."""
        given = [pair for pair in _PAIRS if any(getattr(body, name) is not None for name in pair)]
        names = given[0] if len(given) == 1 else None
        missing = [name for name in names or () if getattr(body, name) is None]
        if names is None or missing:
            raise RequestError(
                "The body must have text_1 and text_2 (or queries and documents, or data_1 and "
                "data_2), and no others of these.",
                field="text_1" if names is None else missing[0],
            )
        texts = [_listed(getattr(body, name)) for name in names]
        for name, listed in zip(names, texts):
            _check_count(name, len(listed))
        try:
            pairs = pair_up(*texts)
        except RequestError:
            counts = " and ".join(str(len(listed)) for listed in texts)
            raise RequestError(
                f"{names[0]} must have one text, or as many as {names[1]}; got {counts}.",
                field=names[0],
            ) from None
        head, outputs, scores = await self._scored("score", pairs, names, body, watch)
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        return json_bytes(ScoreList(**head, data=data, usage=_usage(outputs)))

    async def rerank(self, body: RerankBody, watch: PoolingWatch) -> bytes:
        """POST /rerank."""
        _check_count("documents", len(body.documents))
        texts = [_document(item, f"documents[{at}]") for at, item in enumerate(body.documents)]
        if body.top_n is not None and body.top_n < 1:
            raise RequestError(f"top_n must be at least 1, got {body.top_n}.", field="top_n")
        pairs: list[tuple[Prompt, Prompt]] = [(body.query, text) for text in texts]
        names = ("query", "documents")
        head, outputs, scores = await self._scored("rerank", pairs, names, body, watch)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        shows = body.return_documents is not False
        results = [
            Relevance(index=index, relevance_score=scores[index], document=Document(texts[index]))
            if shows
            else Relevance(index=index, relevance_score=scores[index])
            for index in order[: body.top_n]
        ]
        answer = Ranking(id=head["id"], model=head["model"], results=results, usage=_usage(outputs))
        return json_bytes(answer)

    def _params(self, body: PooledBody, **fields: Any) -> PoolingParams:
        """Raises also where this server does not pool at all."""
        self._check_model(body.model)
        if not self._engine.config.pools:
            raise ApiError(
                400,
                "This server generates, and pools nothing: for embeddings, classes and scores, "
                "start one with --runner pooling.",
            )
        return PoolingParams(
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            use_activation=getattr(body, "use_activation", None),
            **fields,
        )

    async def _inputs(self, body: InputBody) -> list[_Asked]:
        size = len(body.prompt_embeds) if isinstance(body.prompt_embeds, str) else 0
        is_small = size < _SMALL and not isinstance(body.prompt_embeds, list)
        return await beside_loop(self._pool, is_small, self._read_inputs, body)

    def _read_inputs(self, body: InputBody) -> list[_Asked]:
        has_input = body.input is not None
        if has_input == (body.prompt_embeds is not None):
            count = "both" if has_input else "none"
            raise RequestError(
                f"The body must have one of input and prompt_embeds, got {count}.", field="input"
            )
        if body.prompt_embeds is not None:
            places = _places("prompt_embeds", body.prompt_embeds)
            return [
                _Asked({"prompt_embeds": one}, "prompt_embeds", place)
                for one, place in zip(self._reader.embeds(body.prompt_embeds, MAX_INPUTS), places)
            ]
        assert body.input is not None
        prompts = as_prompts(body.input, "input", MAX_INPUTS)
        places = _places("input", prompts if len(prompts) > 1 else "")
        return [
            _Asked(one if isinstance(one, str) else {"prompt_token_ids": one}, "input", place)
            for one, place in zip(prompts, places)
        ]

    async def _scored(
        self,
        kind: str,
        pairs: Sequence[tuple[Prompt, Prompt]],
        names: tuple[str, str],
        body: ScoreBody | RerankBody,
        watch: PoolingWatch,
    ) -> tuple[dict[str, Any], list[Output], list[float]]:
        """Head and outputs as of `_run`, and a score for each pair."""
        params = self._params(body)
        try:
            judges = scores_pairs(self._engine.config.pooling)
        except RequestError as error:
            raise RequestError(f"This endpoint is for another kind of model: {error}") from None
        if judges:
            asked = [
                _Asked(as_pair_prompt(*pair), names[1], f"{names[1]}[{at}]")
                for at, pair in enumerate(pairs)
            ]
            params = self._params(body, task="classify")
            head, outputs = await self._run(kind, asked, params, body, watch)
            return head, outputs, [float(one[0]) for one in _arrays(outputs)]
        # A text is pooled once, however many others it is compared with.
        unique: dict[Any, _Asked] = {}
        for at, pair in enumerate(pairs):
            for name, text in zip(names, pair):
                unique.setdefault(text, _Asked(text, name, f"{name}[{at}]"))
        params = self._params(body, task="embed")
        head, outputs = await self._run(kind, list(unique.values()), params, body, watch)
        vectors = dict(zip(unique, _arrays(outputs)))
        kind = self._engine.config.pooling.similarity
        return head, outputs, [similarity(kind, vectors[a], vectors[b]) for a, b in pairs]

    async def _run(
        self,
        kind: str,
        asked: Sequence[_Asked],
        params: PoolingParams,
        body: PooledBody,
        watch: PoolingWatch,
    ) -> tuple[dict[str, Any], list[Output]]:
        """What all answers begin with, and each prompt's output. The first that fails ends all."""
        for one in asked:
            self._check_length(one)
        head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._name,
        }
        outputs: list[Any] = [None] * len(asked)
        left = deque(range(len(asked)))
        num_workers = min(len(asked), self._max_running)

        async def work() -> None:
            nonlocal num_workers
            while left:
                place = left.popleft()
                name = f"{head['id']}-{place}"
                try:
                    outputs[place] = await self._one(name, asked[place], params, body)
                except EngineBusy:
                    if num_workers == 1:
                        raise
                    # There is room for as many as are under way, and these go on with it.
                    num_workers -= 1
                    left.appendleft(place)
                    return
                watch.take(outputs[place])

        watch.begin(str(head["id"]), len(asked))
        error: BaseException | None = None
        tasks = [asyncio.create_task(work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*tasks)
        except BaseException as failure:
            error = failure
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            watch.end(error)
        return head, outputs

    async def _one(
        self, request_id: str, asked: _Asked, params: PoolingParams, body: PooledBody
    ) -> Output:
        try:
            return await self._engine.pool(
                asked.prompt,
                params,
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
        except RequestError as error:
            if error.field == "task" and not isinstance(body, PoolingBody):
                # It came from the path, not from the client.
                raise RequestError(f"This endpoint is for another kind of model: {error}") from None
            if error.field not in _OF_PROMPTS:
                raise
            # In the words of the body, which does not have the engine's field.
            text = str(error)
            if error.field != asked.field:
                text = text.replace(str(error.field), asked.field)
            if asked.place != asked.field:
                text = f"{asked.place}: {text}"
            raise RequestError(text, field=asked.field) from None

    def _check_length(self, asked: _Asked) -> None:
        """Of texts, before time goes into tokenising them."""
        most = self._reader.max_characters
        prompt = asked.prompt
        texts = (
            [prompt]
            if isinstance(prompt, str)
            else [prompt.get("prompt"), prompt.get("prompt_pair")]
        )
        for text in texts:
            if isinstance(text, str) and len(text) > most:
                raise RequestError(
                    f"{asked.place} may have {most} characters, got {len(text)}.",
                    field=asked.field,
                )

    async def _written(self, outputs: Sequence[Output], made: Callable[[], Any]) -> bytes:
        size = sum(one.size for one in _arrays(outputs))
        return await beside_loop(self._pool, size < _SMALL, lambda: json_bytes(made()))


def _arrays(outputs: Sequence[Output]) -> list[Float32Array]:
    found = []
    for output in outputs:
        assert output.outputs is not None, "a failed one has raised"
        found.append(output.outputs.data)
    return found


def _base64(array: Float32Array) -> str:
    return base64.b64encode(array.astype("<f4", copy=False).tobytes()).decode()


def _usage(outputs: Sequence[Output]) -> PoolingUsage:
    count = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return PoolingUsage(
        prompt_tokens=count, total_tokens=count, prompt_tokens_details=CachedTokens(cached)
    )


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given


def _places(name: str, given: object) -> list[str]:
    """What the items of a field are called; the field itself if it is one."""
    return [f"{name}[{at}]" for at in range(len(given))] if isinstance(given, list) else [name]


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MAX_INPUTS:
        raise RequestError(f"{name} must have 1 to {MAX_INPUTS} items, got {count}.", field=name)


def _document(item: str | dict[str, Any], where: str) -> str:
    if isinstance(item, str):
        return item
    text = item.get("text")
    if not isinstance(text, str) or len(item) > 1:
        raise RequestError(
            f"{where} must be text, or an object with nothing but text.", field="documents"
        )
    return text
