"""`pelton bench throughput`: many requests handed over at once; tokens per second over all."""

from __future__ import annotations

import dataclasses
from typing import Any

from pelton.bench import cost, machine, measure, report
from pelton.bench.options import ThroughputOptions
from pelton.bench.session import open_session, profiled
from pelton.config.engine import EngineArgs, EngineConfig


def run(args: EngineArgs, options: ThroughputOptions) -> None:
    """Measures, prints, writes the result file."""
    session = open_session(args, options)
    samples = sample(session.sides, session.config, options)
    result = session.context | tell(samples, session.config, options, session.ceilings)
    result |= profiled(
        session,
        options,
        batch_size=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
    )
    report.write_json(options.json, result)


def sample(
    sides: list[measure.Side], config: EngineConfig, options: ThroughputOptions
) -> list[list[float]]:
    """Each side's seconds for all requests, per iteration."""
    prompts = measure.random_prompts(
        config.model.vocab_size, options.num_prompts, options.input_len, config.seed
    )
    return measure.alternate(
        sides,
        lambda side: measure.timed_generate(side, prompts, options.output_len),
        num_warmup=options.num_iters_warmup,
        num_iters=options.num_iters,
    )


def tell(
    samples: list[list[float]],
    config: EngineConfig,
    options: ThroughputOptions,
    ceilings: machine.Ceilings,
) -> dict[str, Any]:
    """Prints each side's figures, the share of the floor and the ratios; returns them.

    The floor: one prefill at the product ceiling, then output_len - 1 steps with every request in
    each, at the read ceiling.
    """
    shape = {"batch_size": options.num_prompts, "input_len": options.input_len}
    step_bytes = cost.decode_bytes(
        config.model,
        config.dtype,
        quantised=config.quantization,
        kv_dtype=config.cache.dtype,
        output_len=options.output_len,
        **shape,
    )
    floor = (
        cost.prefill_flops(config.model, **shape) / ceilings.flops_per_s
        + (options.output_len - 1) * step_bytes / ceilings.read_bytes_per_s
    )
    num_output = options.num_prompts * options.output_len
    num_total = num_output + options.num_prompts * options.input_len
    result: dict[str, Any] = {"floor_seconds": floor, "sides": {}}
    for name, seconds in zip(("engine", "baseline"), samples, strict=False):
        summary = report.Summary.of(seconds)
        output_speed = report.Summary.of([num_output / value for value in seconds])
        result["sides"][name] = {
            "samples_s": seconds,
            "seconds": dataclasses.asdict(summary),
            "output_tokens_per_s": dataclasses.asdict(output_speed),
            "total_tokens_per_s": num_total / summary.median,
            "requests_per_s": options.num_prompts / summary.median,
            "share_of_floor": floor / summary.median,
        }
        print(f"{name:9} seconds          {summary.line()}")
        print(f"{name:9} output tokens/s  {output_speed.line()}")
        print(
            f"{name:9} {num_total / summary.median:.1f} tokens/s with the prompts, "
            f"{options.num_prompts / summary.median:.2f} requests/s, floor {floor:.2f} s = "
            f"{floor / summary.median:.2f} of the median"
        )
    if len(samples) == 2:
        engine, baseline = ([1 / value for value in seconds] for seconds in samples)
        result["ratio"] = report.print_ratios("throughput", engine, baseline)
    return result
