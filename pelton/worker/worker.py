"""One device: a loaded model and its runner."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
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
from pelton.device.protocol import Device, MeasuredDevice
from pelton.device.table import DEVICES
from pelton.device.upload import upload_to
from pelton.forward.eager import as_live
from pelton.layers.context import BuildContext
from pelton.models.protocol import Model
from pelton.models.table import MODELS
from pelton.quant.scheme import Scheme
from pelton.quant.table import SCHEMES
from pelton.runner.assemble import Assembled, assemble, attention_backend
from pelton.runner.capture import record_all
from pelton.runner.heads.protocol import StepOutcome
from pelton.runner.synthetic import time_prompt, warm_up
from pelton.weights.loader import load_weights
from pelton.weights.source import open_source
from pelton.worker.sizing import fit_cache

# Tokens: many enough that a step is bound by products, and not by the weights' way through memory.
_TIMED_PROMPT = 256
# Bytes of weights from which on loading takes so long that people want to see it.
_LONG_LOAD = 2**30


def make_device(config: EngineConfig) -> Device:
    """The device that the configuration names."""
    kind, _, index = config.device.partition(":")
    module, name = DEVICES[kind].split(":")
    device_class = getattr(importlib.import_module(module), name)
    if kind == "cuda":
        return device_class(int(index or 0))  # type: ignore[no-any-return]
    if kind == "cpu":
        return device_class(config.num_threads)  # type: ignore[no-any-return]
    return device_class()  # type: ignore[no-any-return]


def load_model(config: EngineConfig, build: BuildContext, checkpoint: Checkpoint) -> Model:
    """Build the model, fill every parameter, choose kernels."""
    module, name = MODELS[config.model.architecture].split(":")
    model: Model = getattr(importlib.import_module(module), name)(build, config.model)
    rules = model.names[checkpoint.load_format]
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
    with bar:
        load_weights(
            parameters,
            source,
            rules,
            head_dim=config.model.head_dim,
            scheme=scheme,
            upload=upload_to(build.device),
            progress=bar.update,
        )
    model.bind()
    return model


class Worker:
    """Owns a device's memory. `execute` queues a step and waits for nothing.

    config: the given one, its KV cache as large as what was found free. phases: seconds of each
    start phase, in order. move_costs: what it takes to move KV to host
    memory and back; measured where that is done and they are not given.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        device: Device | None = None,
        choose: Callable[[Descriptor], Descriptor] = as_live,
        move_costs: MoveCosts | None = None,
    ) -> None:
        self.phases: dict[str, float] = {}
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
        )
        with torch.inference_mode():
            started = time.perf_counter()
            others = self._used_bytes()
            with self.device.compiling():
                self.model = load_model(config, build, checkpoint)
            self.phases["load weights"] = time.perf_counter() - started

            def assembled(config: EngineConfig) -> Assembled:
                return assemble(config, self.device, self.model, backend, choose=choose)

            if config.cache.memory_share is not None:
                started = time.perf_counter()
                device = cast(MeasuredDevice, self.device)
                weights = self._used_bytes() - others
                config = fit_cache(device, config, assembled, others=others, weights=weights)
                self.phases["measure memory"] = time.perf_counter() - started
            self.config = config
            started = time.perf_counter()
            self._assembled = assembled(config)
            self.phases["allocate"] = time.perf_counter() - started
            started = time.perf_counter()
            max_tokens = min(config.scheduler.max_num_batched_tokens, config.max_model_len - 1)
            warm_up(
                self._assembled.runner,
                self._assembled.reserved_slot,
                num_groups=len(with_tables(self.groups)),
                max_tokens=max_tokens,
            )
            self.phases["warm up"] = time.perf_counter() - started
            if not self.device.records_when_asked:
                report = record_all(self.device, self._assembled.runner, self._assembled.executor)
                if report.num_recorded:
                    self.phases["record"] = report.seconds
            self.move_costs = move_costs or MoveCosts()
            if config.cache.num_host_pages and move_costs is None:
                started = time.perf_counter()
                self.move_costs = self._measure_moves(min(_TIMED_PROMPT, max_tokens))
                self.phases["time copies"] = time.perf_counter() - started

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
        )
        return MoveCosts(per_token=seconds / prompt_len, per_page=per_page, per_move=per_move)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return self._assembled.groups

    def execute(self, plan: StepPlan) -> StepOutcome:
        """Queue a whole step; its result is collected from what this returns."""
        self.device.attach()
        with torch.inference_mode():
            return self._assembled.runner.finish(self._assembled.runner.start(plan))

    def close(self) -> None:
        self.device.synchronize()
        self._assembled.runner.close()
