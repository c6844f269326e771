"""An AsyncLLM over an engine that needs no model and no process: tokens from a script, on the event
loop's clock. Everything but the link is the real thing.

    llm = scripted_llm(text_script("Hello, world."))       # every request gets these tokens
    llm = scripted_llm(lambda request: [5, 6, 7], delay=0.01)
    engine_of(llm).die("it is gone")                       # as a killed process looks
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from pelton.config.engine import EngineArgs, EngineConfig
from pelton.core.scheduler import SchedulerStats
from pelton.device.memory import cpu_facts
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.facts import facts_of
from pelton.engine.link import EngineLink, Reply, Request
from pelton.engine.prompts import load_template, load_tokenizer_of
from pelton.engine.replicas import Replicas
from pelton.errors import EngineDead
from pelton.messages.codec import decode_to_engine, encode
from pelton.messages.from_engine import CacheReset, Ended, Fault, First, Outputs, StepStats
from pelton.messages.logprobs import PackedRows
from pelton.messages.to_engine import Abort, AddRequest, unpack_token_ids
from pelton.setup.check import CheckedArgs, check
from pelton.setup.resolve import resolve
from pelton.tokens.chat_template import ChatTemplate
from pelton.tokens.tokenizer import Tokenizer

Script = Callable[[AddRequest], Iterable[int]]


@functools.cache
def smollm2() -> tuple[CheckedArgs, EngineConfig, Tokenizer, ChatTemplate]:
    """The embedded model's configuration and text side; no weights. Context 2048, 32 rows."""
    args = EngineArgs(device="cpu", max_model_len=2048, max_num_seqs=32, dtype="float32")
    checked = check(args)
    tokenizer = load_tokenizer_of(checked)
    assert tokenizer is not None
    config = resolve(checked, cpu_facts())
    return checked, config, tokenizer, load_template(None, tokenizer)


def text_script(text: str) -> Script:
    """The tokens of a text (SmolLM2's), then end of sequence."""
    _, config, tokenizer, _ = smollm2()
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    return lambda request: [*ids, config.generation.eos_token_ids[0]]


def echo_script(request: AddRequest) -> Iterable[int]:
    """The prompt, again and again."""
    ids = unpack_token_ids(request.token_ids).tolist()
    while True:
        yield from ids


def scripted_stats() -> SchedulerStats:
    """Of an engine with one KV group that has done nothing yet."""
    return SchedulerStats(0, 0, 0.0, 0, 0, 0, 0, 0, (0,), 0, 0, 0, 0, 0)


class ScriptedEngine:
    """An EngineLink. All open answers get their next token in each step; steps are `delay` seconds
    apart. An answer ends at an end token, at max_tokens, or with its script; log-probabilities are
    -1 for the token, and the ids 0, 1, 2, ... as its alternatives.

    paused: while true, no step is made. failures: request id -> what ends it in the next step.
    sent: every message, as it was sent. max_rows: how many answers are served at a time.
    """

    def __init__(
        self, config: EngineConfig, script: Script, *, delay: float, step_size: int = 1
    ) -> None:
        self.paused = False
        self.failures: dict[str, Fault] = {}
        self.sent: list[Request] = []
        self.is_closed = False
        self.is_running = True
        self._config = config
        self._script = script
        self._delay = delay
        self._step_size = step_size
        self._answers: dict[int, tuple[AddRequest, Any, int]] = {}
        self._counts: dict[int, int] = {}
        self._num_tokens = 0
        self._num_steps = 0
        self._on_reply: Callable[[Reply], None]
        self._on_death: Callable[[EngineDead], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Answers that it still works on."""
        return len(self._answers)

    def listen(self, on_reply: Any, on_death: Any) -> None:
        self._on_reply, self._on_death = on_reply, on_death

    def send(self, message: Request) -> None:
        message = decode_to_engine(encode(message))  # type: ignore[assignment]
        self.sent.append(message)
        if isinstance(message, AddRequest):
            for index in range(message.params.get("n", 1)):
                script = iter(self._script(message))
                self._answers[message.handle + index] = message, script, index
                self._counts[message.handle + index] = 0
        elif isinstance(message, Abort):
            for handle in range(message.first, message.first + message.count):
                self._forget(handle)
        else:
            self._reply(CacheReset(not self._answers))
        if self._timer is None and self._on_death is not None:
            self._timer = asyncio.get_running_loop().call_later(self._delay, self._step)

    async def close(self) -> None:
        self.is_closed, self.is_running = True, False
        self._on_death = None

    def die(self, text: str = "The engine's process was killed by signal 9 (SIGKILL).") -> None:
        """What the front end sees of an engine that died."""
        self.is_running = False
        death, self._on_death = self._on_death, None
        self._answers.clear()
        if death is not None:
            death(EngineDead(text))

    def _forget(self, handle: int) -> None:
        self._answers.pop(handle, None)
        self._counts.pop(handle, None)

    def _reply(self, message: Reply) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: self._on_death is not None and self._on_reply(message))

    def _step(self) -> None:
        self._timer = None
        if self._on_death is None:
            return
        if not self.paused:
            self._reply(self._frame())
        if self._answers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._delay or 0.0005, self._step)

    def _frame(self) -> Outputs:
        handles, counts, ids, num_rows = [], [], [], []
        first, ended = [], []
        width = 0
        for handle, (request, script, index) in list(self._answers.items()):
            fault = self.failures.get(request.request_id)
            if fault is not None:
                ended.append(Ended(handle, "error", fault=fault))
                self._forget(handle)
                continue
            if self._counts[handle] == 0 and index == 0:
                first.append(First(handle, 0, 0.001))
            got, reason, stop = self._next(handle, request, script)
            if got:
                handles.append(handle)
                counts.append(len(got))
                ids += got
                wanted = request.params.get("logprobs")
                num_rows.append(0 if wanted is None else len(got))
                width = max(width, wanted or 0)
            if reason is not None:
                ended.append(Ended(handle, reason, stop_token=stop))
                self._forget(handle)
        self._num_tokens += len(ids)
        self._num_steps += 1
        num = sum(num_rows)
        rows = PackedRows(
            width,
            np.full(num, -1.0, "<f4").tobytes(),
            np.ones(num, "<i4").tobytes(),
            np.tile(np.arange(width, dtype="<i4"), num).tobytes(),
            np.tile(-1.0 - np.arange(width, dtype="<f4"), num).tobytes(),
        )
        running = min(len(self._answers), self._config.scheduler.max_num_seqs)
        return Outputs(
            handles=np.array(handles, "<i8").tobytes(),
            counts=np.array(counts, "<i4").tobytes(),
            token_ids=np.array(ids, "<i4").tobytes(),
            first=first,
            ended=ended,
            scheduler=replace(
                scripted_stats(),
                num_running=running,
                num_waiting=len(self._answers) - running,
                kv_usage=running / self._config.scheduler.max_num_seqs,
                num_steps=self._num_steps,
                num_scheduled_tokens=self._num_tokens,
                num_generated_tokens=self._num_tokens,
            ),
            step=StepStats(len(handles), len(ids), self._delay),
            num_rows=np.array(num_rows, "<i4").tobytes() if num else b"",
            logprobs=rows if num else None,
        )

    def _next(
        self, handle: int, request: AddRequest, script: Any
    ) -> tuple[list[int], Any, int | None]:
        params = request.params
        most = params.get("max_tokens", 16) or 10**9
        stops = params.get("stop_token_ids", ())
        eos = () if params.get("ignore_eos") else request.eos_token_ids
        got: list[int] = []
        while len(got) < self._step_size:
            token = next(script, None)
            if token is None:
                return got, "stop", None
            got.append(token)
            self._counts[handle] += 1
            if token in eos or token in stops:
                return got, "stop", None if token in eos else token
            if self._counts[handle] >= most:
                return got, "length", None
        return got, None, None


def scripted_llm(
    script: Script = echo_script,
    *,
    delay: float = 0.0,
    step_size: int = 1,
    num_replicas: int = 1,
    **options: Any,
) -> AsyncLLM:
    """For use within a running event loop; options are AsyncLLM's."""
    checked, config, tokenizer, template = smollm2()
    config = replace(config, parallel=replace(config.parallel, data=num_replicas))
    engines = [
        ScriptedEngine(config, script, delay=delay, step_size=step_size)
        for _ in range(num_replicas)
    ]
    names = [f"Replica {index}" for index in range(num_replicas)]
    engine: EngineLink = engines[0] if num_replicas == 1 else Replicas(engines, names, config)
    facts = facts_of(config, checked.checkpoint.name, {"process": 0.1, "load weights": 0.2})
    return AsyncLLM(engine, config, facts, tokenizer, template, **options)


def engine_of(llm: AsyncLLM) -> ScriptedEngine:
    link = llm._link
    assert isinstance(link, ScriptedEngine)
    return link


def engines_of(llm: AsyncLLM) -> list[ScriptedEngine]:
    """Of one with several replicas."""
    link = llm._link
    assert isinstance(link, Replicas)
    return cast(list[ScriptedEngine], link._links)
