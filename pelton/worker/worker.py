"""One device: a loaded model and its runner."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

import torch
from tqdm import tqdm

from pelton.checkpoint.source import Checkpoint
from pelton.config.engine import EngineConfig
from pelton.core.descriptor import Descriptor
from pelton.core.kv.groups import with_tables
from pelton.core.kv.host_pages import MoveCosts
from pelton.core.kv.spec import KVGroup
from pelton.core.plan import StepPlan
from pelton.device.late_compiles import LateCompiles
from pelton.device.named import named_device
from pelton.device.protocol import Device, MeasuredDevice
from pelton.device.upload import upload_to
from pelton.errors import ConfigError
from pelton.forward.eager import as_live
from pelton.forward.recorded import RecordedExecutor
from pelton.layers.context import BuildContext, Communicator, OneRank
from pelton.models.pooling_names import pooling_names
from pelton.models.protocol import Model
from pelton.models.table import MODELS
from pelton.pooling.methods import method_facts
from pelton.quant.scheme import Scheme
from pelton.quant.table import SCHEMES
from pelton.runner.assemble import Assembled, PipelinePlace, assemble, attention_backend
from pelton.runner.capture import Recorder, rehearse
from pelton.runner.heads.protocol import StepOutcome
from pelton.runner.model_runner import ModelRunner
from pelton.runner.self_test import TESTED_TOKENS, SelfTest
from pelton.runner.synthetic import synthetic_plan, time_prompt, warm_up
from pelton.weights.loader import load_weights
from pelton.weights.source import open_source
from pelton.worker.asked import costly_params, first_params, other_params
from pelton.worker.sizing import fit_cache

# Tokens: many enough that a step is bound by products, and not by the weights' way through memory.
_TIMED_PROMPT = 256
# Bytes of weights from which on loading takes so long that people want to see it.
_LONG_LOAD = 2**30


def make_device(config: EngineConfig) -> Device:
    """The device that the configuration names."""
    return named_device(
        config.device, num_threads=config.num_threads, staging_mode=config.staging_mode
    )


Phase = Callable[[str], AbstractContextManager[object]]


def load_model(
    config: EngineConfig,
    build: BuildContext,
    checkpoint: Checkpoint,
    *,
    phase: Phase = nullcontext,
    compiling: Callable[[], object] = lambda: None,
) -> Model:
    """Build the model, fill every parameter, choose kernels. phase: times what it surrounds, by
    name; compiling: called when kernels are about to be asked for."""
    module, name = MODELS[config.model.architecture].split(":")
    with phase("build model"):
        model: Model = getattr(importlib.import_module(module), name)(build, config.model)
    rules = model.names[checkpoint.load_format]
    if not config.model.has_lm_head:
        rules = pooling_names(rules)
    parameters = model.parameters()
    source = open_source(checkpoint, parameters, rules, seed=config.seed)
    module, name = SCHEMES[config.quantization.scheme].split(":")
    scheme: Scheme = getattr(importlib.import_module(module), name)()
    total = sum(parameter.tensor.nbytes for parameter in parameters.values())
    bar = tqdm(
        total=total,
        desc="Weights",
        unit="B",
        unit_scale=True,
        disable=total < _LONG_LOAD or not sys.stderr.isatty(),
    )
    with phase("load weights"), bar:
        load_weights(
            parameters,
            source,
            rules,
            head_dim=config.model.head_dim,
            scheme=scheme,
            upload=upload_to(build.device),
            progress=bar.update,
        )
    with phase("choose kernels"):
        compiling()
        model.bind()
    return model


def _out_of_memory(config: EngineConfig, phase: str) -> str:
    """What to change."""
    if phase in ("build model", "load weights", "choose kernels"):
        return (
            f"{config.device} has not enough memory for the weights; take a smaller model or dtype."
        )
    tokens, rows = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    ways = [f"max_num_batched_tokens from {tokens} to {max(tokens // 2, 1)}"]
    if rows > 1:
        ways.append(f"max_num_seqs from {rows} to {rows // 2}")
    if (share := config.cache.memory_share) is not None:
        ways.insert(0, f"gpu_memory_utilization from {share} to {max(share - 0.05, 0.05):.2f}")
    elif config.cache.num_blocks > 2:
        less = config.cache.num_blocks * 9 // 10
        ways.insert(0, f"num_gpu_blocks_override from {config.cache.num_blocks} to {less}")
    return f"{config.device} ran out of memory at {phase!r}: lower {', or '.join(ways)}."


class Worker:
    """Owns a device's memory. `execute` queues a step and waits for nothing.

    config: the given one, its KV cache as large as what was found free, with what ways to pool
    there are. phases: seconds of each
    start phase, in order. move_costs: what it takes to move KV to host
    memory and back; measured where that is done and they are not given.

    Of several workers: communicator: of the ranks that share each layer; place: in the pipeline;
    agree_on_blocks: the number of KV blocks that all of them have room for, given this one's.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        device: Device | None = None,
        choose: Callable[[Descriptor], Descriptor] = as_live,
        move_costs: MoveCosts | None = None,
        communicator: Communicator | None = None,
        place: PipelinePlace | None = None,
        agree_on_blocks: Callable[[int], int] = int,
    ) -> None:
        communicator = communicator or OneRank()
        self.phases: dict[str, float] = {}
        self._in_phases = 0.0
        self.device = device or make_device(config)
        backend = attention_backend(config)
        build = BuildContext(
            device=self.device.torch_device,
            dtype=getattr(torch, config.dtype),
            backend=backend,
            kv_codes=(
                None if config.cache.dtype == config.dtype else getattr(torch, config.cache.dtype)
            ),
            batch_invariant=config.batch_invariant,
            rank=communicator.rank,
            size=communicator.size,
            layers=None if place is None else range(place.lo, place.hi),
        )
        if config.pools:
            config = replace(config, pooling=replace(config.pooling, methods=method_facts()))
        self.config = config
        self.late_compiles = LateCompiles()
        self.late_compiles.stop()  # of an engine before this one
        self._is_recorded = False
        self._compilers = contextlib.ExitStack()
        with torch.inference_mode(), self._compilers:
            others = self._used_bytes()
            self.model = load_model(
                config,
                build,
                checkpoint,
                phase=self._phase,
                compiling=lambda: self._compilers.enter_context(self.device.compiling()),
            )

            def assembled(config: EngineConfig) -> Assembled:
                return assemble(
                    config,
                    self.device,
                    self.model,
                    backend,
                    place=place,
                    communicator=communicator,
                    choose=choose,
                )

            if config.cache.memory_share is not None:
                with self._phase("measure memory"):
                    self.config = config = fit_cache(
                        cast(MeasuredDevice, self.device),
                        config,
                        assembled,
                        self._rehearse,
                        others=others,
                        weights=self._used_bytes() - others,
                        agree_on_blocks=agree_on_blocks,
                    )
            with self._phase("allocate"):
                self._assembled = assembled(config)
            logging.getLogger("pelton").info("%s", self.device.describe_staging())
            if config.memory is None:
                self._rehearse(self._assembled)
            num_groups = len(with_tables(self.groups))
            max_tokens = min(config.scheduler.max_num_batched_tokens, config.max_model_len - 1)
            with self._phase("warm up"):
                warm_up(
                    self._assembled.runner,
                    self._assembled.reserved_slot,
                    num_groups=num_groups,
                    max_tokens=max_tokens,
                    params=first_params(config),
                )
            self._recorder = Recorder(self.device, self._assembled.runner, self._assembled.executor)
            if not (self.device.records_when_asked or config.graphs.is_eager):
                with self._phase("record"):
                    self._record()
            self.move_costs = move_costs or MoveCosts()
            if config.cache.num_host_pages and move_costs is None:
                with self._phase("time copies"):
                    self.move_costs = self._measure_moves(min(_TIMED_PROMPT, max_tokens))

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Times a phase of the start, less the phases in it, and says what helps where memory is
        short."""
        started, outside, self._in_phases = time.perf_counter(), self._in_phases, 0.0
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise ConfigError(_out_of_memory(self.config, name)) from error
        elapsed = time.perf_counter() - started
        self.phases[name] = elapsed - self._in_phases
        self._in_phases = outside + elapsed

    def _rehearse(self, made: Assembled) -> None:
        """All kernels that were asked for are there after that."""
        if self.device.records_when_asked:
            return
        with self._phase("compile kernels"):
            most = self.config.scheduler.max_num_batched_tokens
            plans = [
                synthetic_plan(
                    made.reserved_slot,
                    query_lens=[1] * min(self.config.scheduler.max_num_seqs, most),
                    num_groups=len(with_tables(made.groups)),
                    params=params,
                )
                for params in (costly_params(self.config), *other_params(self.config))
            ]
            rehearse(self.device, made.runner, made.executor, most, plans)
            self._compilers.close()

    def _record(self) -> None:
        """The shapes that the first requests will have, and a test of them; the others come between
        steps."""
        made, logger = self._assembled, logging.getLogger("pelton")
        if not isinstance(made.executor, RecordedExecutor):
            logger.warning(
                "No step is recorded: a CUDA graph cannot hold attention_backend=%r, or recurrent "
                "layers in float64 or without triton, which need lengths on the host. Small models "
                "are much slower so.",
                self.config.attention_backend,
            )
            return
        logger.info("%s", self._recorder.record_first().describe())
        test = SelfTest(
            self.device,
            made.runner,
            made.executor,
            with_tables(self.groups),
            reserved_slot=made.reserved_slot,
            max_rows=self.config.scheduler.max_num_seqs,
            is_recurrent=self.config.model.is_recurrent,
        )
        config = self.config
        has_room = test.num_blocks <= config.cache.num_blocks
        most = min(config.max_model_len, config.scheduler.max_num_batched_tokens)
        if has_room and most >= TESTED_TOKENS:
            test.run()

    def _used_bytes(self) -> int:
        """Of a device that tells."""
        memory = getattr(self.device, "memory", None)
        return 0 if memory is None else int(memory()[0])

    def _measure_moves(self, prompt_len: int) -> MoveCosts:
        """What moving KV to host memory and back costs here, and what computing it costs."""
        per_page, per_move = self._assembled.offload.measure()
        seconds = time_prompt(
            self._assembled.runner,
            self._assembled.reserved_slot,
            num_groups=len(with_tables(self.groups)),
            length=prompt_len,
            params=first_params(self.config)[0],
        )
        return MoveCosts(per_token=seconds / prompt_len, per_page=per_page, per_move=per_move)

    @property
    def runs_inline(self) -> bool:
        """As the device's."""
        return self.device.runs_inline

    def listen(self, on_failure: Callable[[Exception], object]) -> None:
        """This process is the worker's: it can only fail in the midst of a call."""

    @property
    def runner(self) -> ModelRunner:
        return self._assembled.runner

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return self._assembled.groups

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Queue a whole step; its result is collected from what this returns."""
        self.device.attach()
        with torch.inference_mode():
            return self._assembled.runner.finish(self._assembled.runner.start(plan))

    def record_next(self) -> bool:
        """Record one more shape, while the device is busy or nobody waits; False if there is none
        left. What is compiled from then on is late."""
        if self._is_recorded:
            return False
        self.device.attach()
        with torch.inference_mode():
            self._is_recorded = not self._recorder.record_next()
        if self._is_recorded:
            self.late_compiles.watch()
        return not self._is_recorded

    def close(self) -> None:
        self.late_compiles.stop()
        self.device.synchronize()
        logging.getLogger("pelton").debug("%s", self._assembled.staged.describe())
        self._assembled.runner.close()
