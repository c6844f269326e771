"""From arguments to a running server, and back to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from pelton.config.engine import EngineArgs
from pelton.config.env import api_keys
from pelton.config.server import ServerArgs
from pelton.engine.async_llm import AsyncLLM
from pelton.engine.prompts import load_template
from pelton.errors import ConfigError
from pelton.metrics.prometheus import ServerMetrics
from pelton.server.app import create_app
from pelton.server.connections import Server, server_of
from pelton.server.keys import read_keys
from pelton.server.listen import bound_socket, raise_file_limit, url_of
from pelton.server.options import check_server
from pelton.server.pooling import PoolingService
from pelton.server.prompts import PromptReader
from pelton.server.service import Service
from pelton.server.state import ServerState, engine_numbers
from pelton.server.throughput import log_throughput
from pelton.tokens.chat_template import ContentChoice
from pelton.tokens.threads import step_back

log = logging.getLogger("pelton.server")

_THREADS = 2
_INTERRUPTED = 130
_LONG_PHASE = 2.0  # seconds
_LAST_WORDS = 1.0  # seconds in which clients and probes learn that the engine has died


def serve(engine_args: EngineArgs, args: ServerArgs) -> int:
    """Serves until it is told to stop by Ctrl-C or SIGTERM. Returns the exit code.

    Raises ConfigError kin before anything is loaded where that can be known; EngineDead, with the
    engine's own traceback, when it has died.
    """
    check_server(args)
    keys = read_keys(args.api_key, args.api_key_file, api_keys())
    set_up_logging(args.log_level)
    raise_file_limit()
    # A thread that runs a template must not keep the event loop waiting for 5 ms each time.
    sys.setswitchinterval(0.0005)
    loop_factory = uvicorn.Config("", log_config=None).get_loop_factory()
    with bound_socket(args) as listener, asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_Serving(engine_args, args, keys, listener).run())


def make_state(
    engine: AsyncLLM, args: ServerArgs, *, chat_template: str | None = None
) -> ServerState:
    """What the application serves. chat_template: as in EngineArgs.

    Raises ConfigError for a model without a tokenizer.
    """
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "a server needs the model's tokenizer, and there is none here; pass --tokenizer FOLDER."
        )
    template = load_template(
        chat_template,
        tokenizer,
        content_format=cast(ContentChoice, args.chat_template_content_format),
    )
    config = engine.config
    names = args.served_model_name or [engine.facts.model]
    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pelton-request", initializer=step_back)
    reader = PromptReader(
        tokenizer,
        template,
        vocab_size=config.model.vocab_size,
        max_model_len=config.max_model_len,
        pool=pool,
        trusts_templates=args.trust_request_chat_template,
        takes_embeds=config.enable_prompt_embeds,
    )
    metrics = ServerMetrics(
        model_name=names[0],
        max_model_len=config.max_model_len,
        engine=lambda: engine_numbers(engine.stats()),
        cache_info={
            "block_size": str(config.cache.block_size),
            "num_gpu_blocks": str(config.cache.num_blocks),
            "cache_dtype": config.cache.dtype,
            "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        },
        prefix=args.metrics_prefix,
    )
    service = Service(
        engine,
        reader,
        names=names,
        defaults=engine.default_sampling,
        max_logprobs=config.max_logprobs,
        max_answers=engine.max_answers,
        generates=not config.pools,
    )
    pooling = PoolingService(
        engine,
        service.check_model,
        reader,
        name=names[0],
        pool=pool,
    )
    return ServerState(
        engine=engine,
        service=service,
        pooling=pooling,
        reader=reader,
        metrics=metrics,
        args=args,
        names=names,
        root=engine.facts.model,
        max_model_len=config.max_model_len,
        pool=pool,
    )


class _Serving:
    """One run of the server, and what signals do to it."""

    def __init__(
        self, engine_args: EngineArgs, args: ServerArgs, keys: list[str], listener: socket.socket
    ) -> None:
        self._engine_args = engine_args
        self._args = args
        self._keys = keys
        self._listener = listener
        self._num_signals = 0
        self._server: Server | None = None
        self._state: ServerState | None = None
        self._engine: AsyncLLM | None = None
        self._main: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        self._main = asyncio.create_task(self._run())
        with contextlib.suppress(asyncio.CancelledError):
            await self._main
        return 0 if self._num_signals == 1 else _INTERRUPTED

    def _stop(self) -> None:
        """Ctrl-C or SIGTERM: first ask, then insist, then leave without a word."""
        self._num_signals += 1
        if self._num_signals == 1 and self._server is not None:
            log.info("Stopping when running requests are done; once more, and they are ended.")
            self._draining = asyncio.create_task(self._drain(self._server))
            timeout = self._args.shutdown_timeout
            self._ending = asyncio.create_task(self._end_requests(timeout))
        elif self._num_signals == 2 and self._server is not None:
            if self._ending is not None:
                self._ending.cancel()
            self._ending = asyncio.create_task(self._end_requests(0.0))
        elif self._num_signals <= 2 and self._main is not None:
            self._num_signals = 2
            self._main.cancel()
        else:
            os._exit(_INTERRUPTED)

    async def _drain(self, server: Server) -> None:
        """Whoever comes now is told to go elsewhere, until nothing is left to do."""
        if self._state is not None:
            self._state.is_stopping = True
        await server.drain()
        server.should_exit = True

    async def _end_requests(self, timeout: float | None) -> None:
        """After `timeout` seconds, if any: running requests get an error, and then a moment in
        which it reaches their clients."""
        if timeout is None or self._engine is None or self._main is None:
            return
        await self._engine.drain(timeout)
        await asyncio.sleep(_LAST_WORDS)
        if self._server is not None:
            self._main.cancel()

    async def _run(self) -> None:
        engine = await AsyncLLM.start(
            self._engine_args,
            max_num_queued_reqs=self._args.max_num_queued_reqs,
            on_phase=_log_phase,
        )
        self._engine = engine
        try:
            state = make_state(engine, self._args, chat_template=self._engine_args.chat_template)
            await self._serve(state, create_app(state, self._keys))
        finally:
            await asyncio.shield(engine.close())

    async def _serve(self, state: ServerState, app: ASGIApp) -> None:
        self._server = server = server_of(app, self._args)
        self._state = state
        gc.collect()
        gc.freeze()  # what is here now stays; looking through it again and again would cost pauses
        watching = asyncio.create_task(self._watch_engine(state))
        logging_rates = asyncio.create_task(_log_rates(state))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            while not (server.started or serving.done()):
                await asyncio.sleep(0.005)
            log.info("%s", ready_table(state, url_of(self._args, self._listener), len(self._keys)))
            await serving
        finally:
            self._server = None
            for task in (watching, logging_rates, serving):
                task.cancel()
            await asyncio.gather(watching, logging_rates, serving, return_exceptions=True)
            state.pool.shutdown(wait=False, cancel_futures=True)
        if (error := state.engine.dead_error) is not None:
            raise error

    async def _watch_engine(self, state: ServerState) -> None:
        """A server without an engine tells so for a moment, and then makes room for another one."""
        error = await state.engine.died()
        log.error("The engine has died: %s", error)
        await asyncio.sleep(_LAST_WORDS)
        if self._server is not None:
            self._server.should_exit = True


def _log_phase(name: str, seconds: float) -> None:
    """So that a long start is not a silent one; `ready_table` has them all."""
    log.log(logging.INFO if seconds > _LONG_PHASE else logging.DEBUG, "%s: %.2f s", name, seconds)


async def _log_rates(state: ServerState) -> None:
    if state.args.log_interval > 0:
        await log_throughput(state, state.args.log_interval)


def set_up_logging(level: str) -> None:
    """Pelton's lines go to standard error, and uvicorn's of faults: what strangers send is none."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    for name, least in (("pelton", level.upper()), ("uvicorn", "ERROR")):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(least)
        logger.propagate = False


def ready_table(state: ServerState, url: str, num_keys: int) -> str:
    """What one wants to know of a server that has just started."""
    facts = state.engine.facts
    replicas = f", on {facts.num_replicas} replicas" if facts.num_replicas > 1 else ""
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in facts.start_times.items())
    rows = {
        "model": f"{facts.model} ({facts.architecture}), called {', '.join(state.names)}",
        "dtype": f"{facts.dtype} on {facts.device}",
        "context": f"{facts.max_model_len} tokens",
        "KV cache": f"{facts.num_kv_tokens} tokens, room for {facts.full_length_requests} requests "
        "of full length"
        if facts.num_kv_tokens
        else "none: a text is computed in one step",
        "prefixes": facts.prefixes,
        "at a time": f"{facts.max_num_seqs} answers{replicas}",
        "started in": f"{sum(facts.start_times.values()):.2f} s: {phases}",
        "API keys": str(num_keys) if num_keys else "none: whoever can connect may ask",
        "URL": url,
    }
    width = max(map(len, rows))
    lines = "\n".join(f"  {name:{width}}  {text}" for name, text in rows.items())
    return f"Pelton is ready.\n{lines}"
