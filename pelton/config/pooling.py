"""What a pooling engine does (`PoolingConfig`), and what a request asks of it (`PoolingParams`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from pelton.config.model import Activation
from pelton.config.names import known_names
from pelton.errors import RequestError

Task = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[str, ...] = get_args(Task)

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)

ProjectionActivation = Literal["identity", "tanh"]

NEEDS_TOKEN_IDS = "token_ids"
"""What a pooling method may declare to need: the ids of the prompt's tokens."""

_PER_TOKEN = ("token_embed", "token_classify")
_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What is made of one prompt's hidden states. Names are vLLM's, but for `method`.

    task: "embed" (a vector of the text) | "classify" (its classes' scores) | "token_embed" |
        "token_classify" (the same for each token). None: what the model is for.
    method: which hidden states are taken: "last" (the last token's) | "cls" (the first one's) |
        "mean" (of all), or for a task of tokens "all" | "step" (tokens that are step_tag_id). None:
        the model's.
    dimensions: of the vectors, cut off behind so many numbers (Matryoshka); None: all.
    use_activation: whether vectors get length 1, and scores become probabilities. None: as the
        model says.
    step_tag_id, returned_token_ids: of "step": the token whose places are taken, and which columns
        of the result; None: the model's, or all columns.
    truncate_prompt_tokens: a longer prompt is cut to its first so many tokens; -1: to the model's
        length. None: it is refused.

    Raises RequestError naming field, value and limit.
    """

    task: Task | None = None
    method: str | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | list[int] | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(
                f"task={self.task!r} is not known." + known_names(str(self.task), TASKS),
                field="task",
            )
        if self.method is not None and not isinstance(self.method, str):
            raise RequestError(
                f"method must be the name of a pooling method, got {self.method!r}.",
                field="method",
            )
        if self.use_activation is not None and type(self.use_activation) is not bool:
            raise RequestError(
                f"use_activation must be True or False, got {self.use_activation!r}.",
                field="use_activation",
            )
        for name, low in (("dimensions", 1), ("step_tag_id", 0)):
            _integer(name, getattr(self, name), low)
        length = self.truncate_prompt_tokens
        _integer("truncate_prompt_tokens", length, -1)
        if length == 0:
            raise RequestError(
                "truncate_prompt_tokens must be at least 1, or -1 for the model's length, got 0.",
                field="truncate_prompt_tokens",
            )
        if self.returned_token_ids is not None:
            if not isinstance(self.returned_token_ids, (list, tuple)) or not (
                self.returned_token_ids
            ):
                raise RequestError(
                    "returned_token_ids must be a list with at least 1 number, got "
                    f"{self.returned_token_ids!r}.",
                    field="returned_token_ids",
                )
            for token in self.returned_token_ids:
                _integer("returned_token_ids", token, 0)
            object.__setattr__(self, "returned_token_ids", tuple(self.returned_token_ids))

    @property
    def is_per_token(self) -> bool:
        """Whether the result has a row for each of the tokens taken, not one for the prompt."""
        return self.task in _PER_TOKEN

    @property
    def classifies(self) -> bool:
        return self.task in ("classify", "token_classify")

    @property
    def sees_all_tokens(self) -> bool:
        """Whether the result is made of other tokens than the last: what a prefix hit covers has no
        hidden states, so such a request does not read the cache."""
        return self.method != "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A product behind the pooling: activation(linear.weight @ x + linear.bias), as the tensors of
    `file` (safetensors) are called."""

    file: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: ProjectionActivation


class MethodFacts(NamedTuple):
    """What a front end must know of a pooling method: needs, of a request."""

    name: str
    is_per_token: bool
    needs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How an engine pools; without tasks it generates.

    tasks: what requests may ask; the first is the default. method: of a task of whole prompts,
    unless the request says another. normalises: whether vectors get length 1. activation: of
    classes. projections: what vectors go through, one after the other. embedding_size: numbers in a
    vector; dimensions: kept of them for a text, unless a request says otherwise; None: all.
    similarity: what two vectors are scored by; of the distances it is the negative. num_labels:
    classes, 0 = none. max_prompt_tokens:
    of a prompt, where the checkpoint's files ask for fewer than the model has room for: what
    max_model_len is, unless it is given. step_tag_id,
    returned_token_ids: defaults of method "step".
    methods: that there are, told by the worker.
    """

    tasks: tuple[Task, ...] = ()
    method: str = "last"
    normalises: bool = True
    activation: Activation = "softmax"
    projections: tuple[Projection, ...] = ()
    embedding_size: int = 0
    dimensions: int | None = None
    similarity: Similarity = "cosine"
    num_labels: int = 0
    max_prompt_tokens: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    methods: tuple[MethodFacts, ...] = ()

    def complete(self, params: PoolingParams) -> PoolingParams:
        """The request's parameters with the model's where it has none of its own.

        Raises RequestError for what this engine does not do.
        """
        if not self.tasks:
            raise wrong_runner(pools=False)
        task = params.task or self.tasks[0]
        if task not in self.tasks:
            raise RequestError(
                f"task={task!r} is not one of this model's: {', '.join(self.tasks)}.", field="task"
            )
        params = replace(params, task=task)
        known = {facts.name: facts.is_per_token for facts in self.methods}
        method = params.method or ("all" if params.is_per_token else self.method)
        if method not in known:
            raise RequestError(
                f"method={method!r} is not known." + known_names(method, known), field="method"
            )
        if known[method] != params.is_per_token:
            fit = [name for name, per_token in known.items() if per_token == params.is_per_token]
            raise RequestError(
                f"method={method!r} does not serve task={task!r}; it may be one of "
                f"{', '.join(fit)}.",
                field="method",
            )
        self._check_dimensions(params)
        if task == "embed" and params.dimensions is None:
            params = replace(params, dimensions=self.dimensions)
        if method == "step":
            params = self._complete_step(params)
        elif params.step_tag_id is not None or params.returned_token_ids is not None:
            name = "step_tag_id" if params.step_tag_id is not None else "returned_token_ids"
            raise RequestError(
                f"{name} is read by method='step' alone, and this is method={method!r}.",
                field=name,
            )
        activates = params.use_activation
        if activates is None:
            activates = True if params.classifies else self.normalises
        return replace(params, method=method, use_activation=activates)

    def needs(self, method: str) -> tuple[str, ...]:
        """What the method has declared to need of a request."""
        return next(facts.needs for facts in self.methods if facts.name == method)

    def _check_dimensions(self, params: PoolingParams) -> None:
        given = params.dimensions
        if given is None:
            return
        if params.classifies:
            raise RequestError(
                f"dimensions cuts embeddings, and this is task={params.task!r}; leave it out.",
                field="dimensions",
            )
        if given > self.embedding_size:
            raise RequestError(
                f"dimensions must be at most {self.embedding_size}, the size of this model's "
                f"embeddings, got {given}.",
                field="dimensions",
            )

    def _complete_step(self, params: PoolingParams) -> PoolingParams:
        tag = self.step_tag_id if params.step_tag_id is None else params.step_tag_id
        if tag is None:
            raise RequestError(
                "method='step' needs step_tag_id, the token whose places are taken.",
                field="step_tag_id",
            )
        columns = params.returned_token_ids or self.returned_token_ids
        width = self.num_labels if params.classifies else self.embedding_size
        if not params.classifies and params.dimensions is not None:
            width = params.dimensions
        for column in columns or ():
            if column >= width:
                raise RequestError(
                    f"returned_token_ids must be columns from 0 to {width - 1} of the result, got "
                    f"{column}.",
                    field="returned_token_ids",
                )
        return replace(params, step_tag_id=tag, returned_token_ids=columns)


def wrong_runner(*, pools: bool) -> RequestError:
    """Of a request that is not what an engine is for. pools: what the engine does."""
    if pools:
        return RequestError(
            "this engine pools (runner='pooling') and yields no tokens; start one with "
            "runner='generate' for answers.",
            field="runner",
        )
    return RequestError(
        "this engine generates (runner='generate') and pools nothing; start one with "
        "runner='pooling' for embeddings and scores.",
        field="runner",
    )


def _integer(name: str, value: Any, low: int) -> None:
    if value is not None and (type(value) is not int or not low <= value <= _INT32):
        raise RequestError(
            f"{name} must be an integer from {low} to {_INT32}, got {value!r}.", field=name
        )
