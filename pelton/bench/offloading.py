"""`pelton bench offloading`: long prompts in a pool that is too small for them, with host memory
for the KV of those that are preempted and without, in turns."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from pelton.bench import cost, machine, measure, profile, report
from pelton.bench.options import OffloadingOptions
from pelton.config.engine import EngineArgs
from pelton.core.plan import Int32Array
from pelton.core.scheduler import SchedulerStats
from pelton.engine.llm import LLM
from pelton.errors import ConfigError

_COUNTS = (
    "num_preemptions",
    "num_scheduled_tokens",
    "num_saved_tokens",
    "num_restored_tokens",
    "num_recomputed_tokens",
)


def run(args: EngineArgs, options: OffloadingOptions) -> None:
    """Measures, prints, writes the result file."""
    if not args.kv_offloading_size:
        raise ConfigError(
            "kv_offloading_size must be given, in GiB: it is what is compared with none."
        )
    if options.baseline:
        raise ConfigError(
            "baseline is of no use here: the other side is the engine without host memory."
        )
    report.check_writable(options.json)
    report.check_writable(options.profile, "profile")
    sized = _engine(args)
    plain = _engine(dataclasses.replace(args, kv_offloading_size=None))
    config = sized.config
    device = machine.torch_device(config.device)
    ceilings = machine.measure_ceilings(device, getattr(torch, config.dtype))
    context = report.context(machine.facts(device), ceilings, args, config, options)
    report.print_context(
        context, cost.weight_bytes(config.model, config.dtype, config.quantization)
    )

    prompts = measure.random_prompts(
        config.model.vocab_size, options.num_prompts, options.input_len, config.seed
    )
    sides = [measure.EngineSide(sized), measure.EngineSide(plain)]
    before = [sized.stats, plain.stats]
    answers = [side.generate(prompts, options.output_len) for side in sides]
    counts = [count(one, llm.stats) for one, llm in zip(before, (sized, plain))]
    samples = measure.alternate(
        sides,
        lambda side: measure.timed_generate(side, prompts, options.output_len),
        num_warmup=options.num_iters_warmup,
        num_iters=options.num_iters,
    )
    result = tell(samples, answers, counts)
    result |= profile.of_run(
        options.profile, sides[0], prompts, options.output_len, config, ceilings
    )
    report.write_json(options.json, context | result)


def count(before: SchedulerStats, after: SchedulerStats) -> dict[str, int]:
    """What one pass over the prompts took."""
    return {name: getattr(after, name) - getattr(before, name) for name in _COUNTS}


def tell(
    samples: list[list[float]], answers: list[Int32Array], counts: list[dict[str, int]]
) -> dict[str, Any]:
    """Prints and returns both sides' seconds and counts, the ratio of their speeds, and how many
    answers are the same. Raises ConfigError if nobody was preempted: then nothing is compared."""
    if not counts[1]["num_preemptions"]:
        raise ConfigError(
            "No request was preempted: lower num_gpu_blocks_override, or raise num_prompts, "
            "input_len or output_len."
        )
    result: dict[str, Any] = {"sides": {}}
    for name, seconds, numbers in zip(("offloading", "plain"), samples, counts, strict=True):
        summary = report.Summary.of(seconds)
        result["sides"][name] = {
            "samples_s": seconds,
            "seconds": dataclasses.asdict(summary),
            **numbers,
        }
        print(f"{name:10} seconds   {summary.line()}")
        print(
            f"{name:10} {numbers['num_preemptions']} preemptions; of their tokens "
            f"{numbers['num_restored_tokens']} copied back, {numbers['num_recomputed_tokens']} "
            f"computed again; {numbers['num_scheduled_tokens']} computed in all"
        )
    ratios = [b / a for a, b in zip(*samples, strict=True)]
    ratio = report.Summary.of(ratios)
    result["ratio"] = {"pairs": ratios, **dataclasses.asdict(ratio)}
    num_same = int(np.all(answers[0] == answers[1], axis=1).sum())
    result["num_same_answers"] = num_same
    pairs = " ".join(f"{value:.3f}" for value in ratios)
    print(
        f"speed with host memory / without: median {ratio.median:.3f}, from {ratio.low:.3f} to "
        f"{ratio.high:.3f} (pairs: {pairs})\n"
        f"{num_same} of {len(answers[0])} answers are the same"
    )
    return result


def _engine(args: EngineArgs) -> LLM:
    return LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})
