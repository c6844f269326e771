"""`pelton bench latency`: one batch in step; prefill and decode apart.

A run that makes one token is the prefill; a run that makes `output_len` less the prefill beside it
is output_len - 1 decode steps. Both sides of a comparison are timed so, from outside.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pelton.bench import cost, machine, measure, report
from pelton.bench.options import LatencyOptions
from pelton.bench.session import open_session, profiled
from pelton.config.engine import EngineArgs, EngineConfig
from pelton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one prefill of the batch, and of one of its decode steps (0 if it has none)."""

    prefill_s: float
    decode_step_s: float


def run(args: EngineArgs, options: LatencyOptions) -> None:
    """Measures, prints, writes the result file."""
    if args.max_num_seqs is None:
        args = dataclasses.replace(args, max_num_seqs=options.batch_size)
    elif args.max_num_seqs < options.batch_size:
        raise ConfigError(
            f"max_num_seqs={args.max_num_seqs} is less than batch_size={options.batch_size}: the "
            "batch would not run in step; raise max_num_seqs."
        )
    session = open_session(args, options)
    samples = sample(session.sides, session.config, options)
    result = session.context | tell(samples, session.config, options, session.ceilings)
    result |= profiled(
        session,
        options,
        batch_size=options.batch_size,
        input_len=options.input_len,
        output_len=options.output_len,
    )
    report.write_json(options.json, result)


def sample(
    sides: list[measure.Side], config: EngineConfig, options: LatencyOptions
) -> list[list[Sample]]:
    """Each side's measured iterations.

    Raises ConfigError when noise hides the decode steps.
    """
    prompts = measure.random_prompts(
        config.model.vocab_size, options.batch_size, options.input_len, config.seed
    )

    def once(side: measure.Side) -> Sample:
        prefill = measure.timed_generate(side, prompts, 1)
        if options.output_len == 1:
            return Sample(prefill, 0.0)
        total = measure.timed_generate(side, prompts, options.output_len)
        if total <= prefill:
            raise ConfigError(
                f"{options.output_len} tokens took no longer than the first one: decode is lost in "
                f"the machine's noise; raise output_len above {options.output_len}."
            )
        return Sample(prefill, (total - prefill) / (options.output_len - 1))

    return measure.alternate(
        sides, once, num_warmup=options.num_iters_warmup, num_iters=options.num_iters
    )


def tell(
    samples: list[list[Sample]],
    config: EngineConfig,
    options: LatencyOptions,
    ceilings: machine.Ceilings,
) -> dict[str, Any]:
    """Prints each side's figures, the shares of the floors and the ratios; returns them."""
    shape = {"batch_size": options.batch_size, "input_len": options.input_len}
    flops = cost.prefill_flops(config.model, **shape)
    floors = {"prefill": flops / ceilings.flops_per_s}
    tokens = {"prefill": options.batch_size * options.input_len}
    if options.output_len > 1:
        num_bytes = cost.decode_bytes(
            config.model,
            config.dtype,
            quantised=config.quantization,
            kv_dtype=config.cache.dtype,
            output_len=options.output_len,
            **shape,
        )
        floors["decode_step"] = num_bytes / ceilings.read_bytes_per_s
        tokens["decode_step"] = options.batch_size

    result: dict[str, Any] = {"floor_seconds": floors, "sides": {}}
    speeds: dict[tuple[str, str], list[float]] = {}
    for name, rows in zip(("engine", "baseline"), samples, strict=False):
        side = result["sides"][name] = {}
        for phase, floor in floors.items():
            seconds = [getattr(row, f"{phase}_s") for row in rows]
            speeds[name, phase] = [tokens[phase] / value for value in seconds]
            summary, speed = report.Summary.of(seconds), report.Summary.of(speeds[name, phase])
            side[phase] = {
                "samples_s": seconds,
                "seconds": dataclasses.asdict(summary),
                "tokens_per_s": dataclasses.asdict(speed),
                "share_of_floor": floor / summary.median,
            }
            label = phase.replace("_", " ")
            print(f"{name:9} {label:11} ms        {summary.line(1e3)}")
            print(
                f"{name:9} {label:11} tokens/s  {speed.line()}   "
                f"floor {floor * 1e3:.2f} ms = {floor / summary.median:.2f} of the median"
            )
    if len(samples) == 2:
        result["ratios"] = {
            phase: report.print_ratios(
                phase.replace("_", " "), speeds["engine", phase], speeds["baseline", phase]
            )
            for phase in floors
        }
    return result
