"""The offline API: `LLM`."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pelton.config.engine import EngineArgs, EngineConfig
from pelton.config.names import known_names
from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams, Task, wrong_runner
from pelton.core.scheduler import SchedulerStats
from pelton.engine.answers import as_request_failure, failed_output
from pelton.engine.calls import Asked, Call, Output, Progress, one_each
from pelton.engine.interrupts import InterruptsBetweenSteps
from pelton.engine.loop import EngineLoop, Updates
from pelton.engine.open_requests import OpenRequests
from pelton.engine.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pelton.engine.pooled_requests import PooledRequests, failed_pooling
from pelton.engine.prompts import Prompt, PromptReader, load_template, load_tokenizer_of
from pelton.engine.scores import as_pair_prompt, pair_up, score_of, scores_pairs
from pelton.errors import ConfigError, EngineError, PeltonError, RequestError, UnsupportedError
from pelton.setup.check import check
from pelton.setup.refusals import OFFLINE_REPLICAS
from pelton.setup.resolve import describe, dtype_warning, prefix_warning, resolve
from pelton.tokens.tokenizer import Tokenizer
from pelton.worker.executor import make_worker
from pelton.worker.facts import device_facts

Params = SamplingParams | Sequence[SamplingParams] | None
PoolingAsked = PoolingParams | Sequence[PoolingParams] | None


class LLM:
    """A model, loaded and ready, in this process.

    Args:
        model: folder, GGUF file, hub id, or None for the embedded model.
        kwargs: fields of EngineArgs.

    Attributes:
        config: what everything was resolved to.
        start_times: seconds of each start phase, in order.

    Raises ConfigError kin before anything is loaded where that can be known.
    """

    def __init__(self, model: str | None = None, **kwargs: Any) -> None:
        _show_log()
        started = time.perf_counter()
        args = _engine_args(model, kwargs)
        checked = check(args)
        if args.data_parallel_size > 1:
            raise UnsupportedError(OFFLINE_REPLICAS.format(value=args.data_parallel_size))
        self.start_times = {"check": time.perf_counter() - started}
        started = time.perf_counter()
        facts = device_facts(checked.args.device)  # the first time ever, kernels are compiled here
        self.start_times["device"] = time.perf_counter() - started
        started = time.perf_counter()
        self.config: EngineConfig = resolve(checked, facts)
        self.start_times["configuration"] = time.perf_counter() - started
        started = time.perf_counter()
        self._tokenizer = load_tokenizer_of(checked)
        self._template = load_template(checked.args.chat_template, self._tokenizer)
        self.start_times["tokenizer"] = time.perf_counter() - started
        worker = make_worker(self.config, checked.checkpoint)
        self.start_times.update(worker.phases)
        self._worker = worker
        self.config = worker.config
        self._loop = EngineLoop(self.config, worker)
        self._open = OpenRequests(self._loop.add, self._loop.abort, self._tokenizer)
        self._pooled = PooledRequests(self._loop.add, self._loop.abort)
        self._reader = PromptReader(self.config, self._tokenizer)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._is_closed = False
        _log_start(self.config, self.start_times)

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError if the model has none."""
        if self._tokenizer is None:
            raise ConfigError(
                "this model has no tokenizer.json; pass tokenizer=FOLDER to give it one."
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's authors recommend (generation_config.json)."""
        return SamplingParams(**self.config.generation.sampling)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; outputs are in the prompts' order.

        Args:
            prompts: one prompt or many: text, {"prompt": text}, {"prompt_token_ids": [...]}, or
                embeddings; see engine/prompts.py.
            sampling_params: for all prompts, or one for each; None: the checkpoint's defaults.
            priority: one per prompt, lower first, under scheduling_policy="priority".

        A lone prompt that is wrong raises RequestError. Among several, a wrong or failed one ends
        with finish_reason "error" and its exception in `output.error`; the others are untouched.
        Ctrl-C takes effect after the step that is running, and the LLM can be used again. Calls
        from several threads take turns; a forked child must make an LLM of its own.
        """
        is_single = isinstance(prompts, (str, Mapping))
        many: Sequence[Prompt] = [prompts] if is_single else _as_prompts(prompts)  # type: ignore[list-item]
        params = self._params_for(many, sampling_params)
        self._check_priority(priority, len(many))
        call = self._call(params, priority)
        with self._lock:
            return self._run(call, many, use_tqdm, is_single=is_single)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingAsked = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt; see `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            task="embed",
            use_tqdm=use_tqdm,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [output.as_kind(EmbeddingOutput.of) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingAsked = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each class for each prompt; see `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            task="classify",
            use_tqdm=use_tqdm,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [output.as_kind(ClassificationOutput.of) for output in outputs]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well pairs go together: one of data_1 with each of data_2, or each with its own.

        A model with a classifier of one class is asked about the pair; of any other model it is the
        similarity of their vectors: the cosine unless the checkpoint says another.
        Raises RequestError as `encode` does.
        """
        pairs = pair_up(data_1, data_2)

        def ask(prompts: list[Prompt], task: Task) -> list[PoolingRequestOutput[PoolingOutput]]:
            return self.encode(
                prompts,
                pooling_params,
                task=task,
                use_tqdm=use_tqdm,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )

        if scores_pairs(self.config.pooling):
            asked = ask([as_pair_prompt(*pair) for pair in pairs], "classify")
            return [output.as_kind(ScoringOutput.of) for output in asked]
        # The query is pooled once, however many documents it is compared with.
        is_shared = all(first is pairs[0][0] for first, _ in pairs)
        first = [pairs[0][0]] if is_shared else [one for one, _ in pairs]
        asked = ask([*first, *(second for _, second in pairs)], "embed")
        left = asked[:1] * len(pairs) if is_shared else asked[: len(pairs)]
        kind = self.config.pooling.similarity
        return [score_of(a, b, kind) for a, b in zip(left, asked[len(first) :], strict=True)]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingAsked = None,
        *,
        task: Task | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool prompts; outputs are in the prompts' order, as float32 arrays.

        Args:
            prompts: as `generate` takes them.
            pooling_params: for all prompts, or one for each; None: the model's defaults.
            task, truncate_prompt_tokens: of those that have none of their own.

        Raises RequestError as `generate` does: for a lone prompt, or an engine that generates.
        """
        is_single = isinstance(prompts, (str, Mapping))
        many: Sequence[Prompt] = [prompts] if is_single else _as_prompts(prompts)  # type: ignore[list-item]
        if not self.config.pools:
            raise wrong_runner(pools=False)
        given = one_each("pooling_params", PoolingParams, pooling_params, len(many))
        filled = {one: _filled(one, task, truncate_prompt_tokens) for one in set(given)}
        asked = [filled[one] for one in given]
        call = Call(self._reader.read_pooled, self._pooled, failed_pooling, asked, None)
        with self._lock:
            return self._run(call, many, use_tqdm, is_single=is_single)

    def _run(
        self,
        call: Call[Asked, Output],
        many: Sequence[Prompt | RequestError],
        use_tqdm: bool,
        *,
        is_single: bool,
    ) -> list[Output]:
        if self._is_closed:
            raise EngineError("this LLM is closed; make a new one.")
        progress: Progress[Output] = Progress(
            len(many), lambda: self.stats.num_generated_tokens, use_tqdm
        )
        outputs = progress.outputs
        with InterruptsBetweenSteps() as interrupts, progress:
            try:
                for index, (prompt, one) in enumerate(zip(many, call.params)):
                    interrupts.check()
                    request_id = str(next(self._ids))
                    text = prompt if isinstance(prompt, str) else None
                    try:
                        if isinstance(prompt, RequestError):
                            raise prompt
                        priority = call.priority[index] if call.priority else 0
                        request, text = call.read(request_id, prompt, one, priority=priority)
                        call.opened.open(request, text)
                    except Exception as error:
                        if is_single:
                            raise
                        if not isinstance(error, PeltonError):
                            error = as_request_failure(request_id, error)
                        progress.end(index, call.failed(request_id, text, error))
                        continue
                    progress.places[request_id] = index
                    # Long lists of prompts: the device works while they are read.
                    _book(call, self._loop.advance(), progress)
                while call.opened:
                    interrupts.check()
                    _book(call, self._loop.step(), progress)
            finally:
                # Ctrl-C, or the device is gone: what is left must not run in the next call.
                call.opened.abort_all()
        assert all(output is not None for output in outputs)
        return outputs  # type: ignore[return-value]

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several.

        messages: [{"role": ..., "content": ...}, ...], or a list of such lists. The model's own
        chat template renders them; special tokens come from it alone. Raises RequestError with the
        template's message for a lone conversation that it refuses; among several, that one ends
        with finish_reason "error".
        """
        tokenizer = self.get_tokenizer()
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError(
                "messages must be a list of {'role': ..., 'content': ...}, or a list of such "
                f"lists, got {messages!r}.",
                field="messages",
            )
        is_single = isinstance(messages[0], Mapping)
        prompts: list[Prompt | RequestError] = []
        for conversation in [messages] if is_single else messages:
            try:
                text = self._template.render(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
            except RequestError as error:
                if is_single:
                    raise
                prompts.append(error)
                continue
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode_chat(text)})
        call = self._call(self._params_for(prompts, sampling_params), None)
        with self._lock:
            return self._run(call, prompts, use_tqdm, is_single=is_single)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while requests are running."""
        return self._loop.scheduler.reset_prefix_cache()

    @property
    def stats(self) -> SchedulerStats:
        """Gauges of now, and counts since the start."""
        return self._loop.scheduler.stats

    def settle(self) -> None:
        """Do now what would be done bit by bit between the first steps: for measurements."""
        with self._lock:
            while self._loop.idle():
                pass

    def close(self) -> None:
        """Wait for the device and let go of it; no request is taken after that."""
        with self._lock:
            self._is_closed = True
            self._worker.close()

    def _check_priority(self, priority: Sequence[int] | None, count: int) -> None:
        if priority is None:
            return
        if self.config.scheduler.policy != "priority":
            raise RequestError(
                'priority needs LLM(scheduling_policy="priority"); this one serves '
                f"{self.config.scheduler.policy!r}.",
                field="priority",
            )
        if (
            not isinstance(priority, Sequence)
            or len(priority) != count
            or not all(type(value) is int for value in priority)
        ):
            raise RequestError(
                f"priority must be a list of one integer per prompt ({count}), got {priority!r}.",
                field="priority",
            )

    def _params_for(self, prompts: Sequence[object], params: Params) -> Sequence[SamplingParams]:
        if self.config.pools:
            raise wrong_runner(pools=True)
        if params is None:
            params = self.get_default_sampling_params()
        return one_each("sampling_params", SamplingParams, params, len(prompts))

    def _call(
        self, params: Sequence[SamplingParams], priority: Sequence[int] | None
    ) -> Call[SamplingParams, RequestOutput]:
        return Call(self._reader.read, self._open, failed_output, params, priority)


def _book(call: Call[Asked, Output], updates: Updates, progress: Progress[Output]) -> None:
    for output in call.opened.take(updates):
        progress.end(progress.places[output.request_id], output)


def _filled(
    params: PoolingParams, task: Task | None, truncate_prompt_tokens: int | None
) -> PoolingParams:
    """With what a call says of all its prompts, where the prompt's own parameters say nothing."""
    length = params.truncate_prompt_tokens
    return dataclasses.replace(
        params,
        task=params.task or task,
        truncate_prompt_tokens=truncate_prompt_tokens if length is None else length,
    )


def _as_prompts(prompts: object) -> list[Prompt]:
    """Raises RequestError for what is no list of prompts, such as bare token ids."""
    is_list = isinstance(prompts, (list, tuple))
    if not is_list or (prompts and all(isinstance(one, int) for one in prompts)):  # type: ignore[attr-defined]
        what = "integers" if is_list else type(prompts).__name__
        raise RequestError(
            "prompts must be a string, {'prompt_token_ids': [...]}, or a list of these, got "
            f"{what}.",
            field="prompt",
        )
    return list(prompts)  # type: ignore[call-overload, no-any-return]


def _show_log() -> None:
    """Lines of the logger "pelton" go to stderr, unless the application has set up logging of its
    own. Before the start, which has lines of its own."""
    logger = logging.getLogger("pelton")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


def _log_start(config: EngineConfig, phases: Mapping[str, float]) -> None:
    """What was decided and how long it took."""
    logger = logging.getLogger("pelton")
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    logger.info("%s\nready in  %.2f s: %s", describe(config), sum(phases.values()), parts)
    for warning in (prefix_warning(config), dtype_warning(config)):
        if warning is not None:
            logger.warning("%s", warning)


def _engine_args(model: str | None, kwargs: Mapping[str, Any]) -> EngineArgs:
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in kwargs:
        if name not in names:
            raise ConfigError(f"LLM has no argument {name!r}." + known_names(name, names))
    return EngineArgs(model=model, **kwargs)
