"""The run-up of every benchmark: an engine, perhaps a baseline, and the machine they run on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from pelton.bench import cost, machine, measure, profile, report, weights
from pelton.bench.options import BenchOptions
from pelton.bench.shapes import with_shape
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.engine.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Ready to measure. sides: the engine, then the baseline if there is one. context: the
    circumstances, JSON-ready."""

    config: EngineConfig
    sides: list[measure.Side]
    ceilings: machine.Ceilings
    context: dict[str, Any]


def profiled(
    session: Session, options: BenchOptions, *, batch_size: int, input_len: int, output_len: int
) -> dict[str, Any]:
    """One more run of the engine, watched, if that is asked for; what the result has of it."""
    vocab_size = session.config.model.vocab_size
    prompts = measure.random_prompts(vocab_size, batch_size, input_len, session.config.seed + 1)
    return profile.of_run(
        options.profile, session.sides[0], prompts, output_len, session.config, session.ceilings
    )


def open_session(args: EngineArgs, options: BenchOptions) -> Session:
    """Loads what is to be measured, measures the ceilings and prints the circumstances."""
    report.check_writable(options.json)
    report.check_writable(options.profile, "profile")
    args = with_shape(args, options.model_shape)
    llm = LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
    llm.settle()
    config: EngineConfig = llm.config
    sides: list[measure.Side] = [measure.EngineSide(llm)]
    if options.baseline:
        sides.append(weights.load_plain_loop(args, config))
    device = machine.torch_device(config.device)
    ceilings = machine.measure_ceilings(device, getattr(torch, config.dtype))
    context = report.context(machine.facts(device), ceilings, args, config, options)
    context["start_seconds"] = llm.start_times
    report.print_context(
        context, cost.weight_bytes(config.model, config.dtype, config.quantization)
    )
    return Session(config=config, sides=sides, ceilings=ceilings, context=context)
