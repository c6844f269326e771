"""`pelton bench speculation`: one answer with drafts and without, in turns.

The prompt is text, not random ids: what drafts are worth depends on what there is to guess.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pelton.bench import cost, machine, measure, profile, report
from pelton.bench.options import SpeculationOptions
from pelton.config.engine import EngineArgs
from pelton.config.params import SamplingParams
from pelton.config.reasons import reason_of
from pelton.core.plan import Int32Array
from pelton.core.scheduler import SchedulerStats
from pelton.engine.llm import LLM
from pelton.errors import ConfigError

TEXT = """Repeat the following text word for word:

The harbour of Vessel opens at six. Ships that come before six wait outside the harbour of Vessel. \
Ships that come after six are led to their place by the harbour master. The harbour master keeps a \
list of all ships, and each ship pays the harbour master two coins for each day in the harbour of \
Vessel. A ship that does not pay the harbour master is led out of the harbour of Vessel before the \
next day ends."""


def run(args: EngineArgs, options: SpeculationOptions) -> None:
    """Measures, prints, writes the result file."""
    if args.speculative_config is None:
        raise ConfigError(
            'speculative_config must be given, as in {"method": "ngram", '
            '"num_speculative_tokens": 4}: it is what is compared with plain decoding.'
        )
    if options.baseline:
        raise ConfigError(
            "baseline is of no use here: the other side is the engine without drafts."
        )
    report.check_writable(options.json)
    report.check_writable(options.profile, "profile")
    text = TEXT if options.prompt_file is None else _read(options.prompt_file)
    drafted = _engine(args)
    plain = _engine(dataclasses.replace(args, speculative_config=None))
    config = drafted.config
    device = machine.torch_device(config.device)
    ceilings = machine.measure_ceilings(device, getattr(torch, config.dtype))
    context = report.context(machine.facts(device), ceilings, args, config, options)
    report.print_context(
        context, cost.weight_bytes(config.model, config.dtype, config.quantization)
    )

    prompts = _prompt_ids(plain, text)
    sides = [measure.EngineSide(drafted), measure.EngineSide(plain)]
    answers = [side.generate(prompts, options.output_len)[0] for side in sides]
    before = drafted.stats
    samples = measure.alternate(
        sides,
        lambda side: measure.timed_generate(side, prompts, options.output_len),
        num_warmup=options.num_iters_warmup,
        num_iters=options.num_iters,
    )
    result = tell(samples, answers, before, drafted.stats, prompts.shape[1], options)
    result |= profile.of_run(
        options.profile, sides[0], prompts, options.output_len, config, ceilings
    )
    report.write_json(options.json, context | result)


def tell(
    samples: list[list[float]],
    answers: list[Int32Array],
    before: SchedulerStats,
    after: SchedulerStats,
    num_prompt_tokens: int,
    options: SpeculationOptions,
) -> dict[str, Any]:
    """Prints and returns both sides' seconds (prefill included), the ratio of their speeds, what
    became of the drafts between the two counts, and whether the answers are the same."""
    result: dict[str, Any] = {"num_prompt_tokens": num_prompt_tokens, "sides": {}}
    for name, seconds in zip(("drafts", "plain"), samples, strict=True):
        summary = report.Summary.of(seconds)
        result["sides"][name] = {"samples_s": seconds, "seconds": dataclasses.asdict(summary)}
        print(f"{name:9} seconds   {summary.line()}")
    drafted, plain = samples
    ratios = [b / a for a, b in zip(drafted, plain, strict=True)]
    ratio = report.Summary.of(ratios)
    result["ratio"] = {"pairs": ratios, **dataclasses.asdict(ratio)}
    num_rows = after.num_drafts - before.num_drafts
    num_drafts = after.num_draft_tokens - before.num_draft_tokens
    num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
    result |= {
        "num_drafts": num_rows,
        "num_draft_tokens": num_drafts,
        "num_accepted_tokens": num_accepted,
        "acceptance_length": 1 + num_accepted / max(num_rows, 1),
    }
    differ = np.flatnonzero(answers[0] != answers[1])
    result["first_difference"] = int(differ[0]) if len(differ) else None
    pairs = " ".join(f"{value:.3f}" for value in ratios)
    print(
        f"speed with drafts / without: median {ratio.median:.3f}, from {ratio.low:.3f} to "
        f"{ratio.high:.3f} (pairs: {pairs})\n"
        f"{num_prompt_tokens} tokens of prompt, {options.output_len} made; acceptance length "
        f"{result['acceptance_length']:.2f}, {num_accepted} of {num_drafts} drafts accepted\n"
        + (
            f"the answers differ from token {differ[0]} on"
            if len(differ)
            else "the answers are the same"
        )
    )
    return result


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"prompt_file={path!r} cannot be read: {reason_of(fault)}.") from fault


def _engine(args: EngineArgs) -> LLM:
    return LLM(**{field.name: getattr(args, field.name) for field in dataclasses.fields(args)})


def _prompt_ids(llm: LLM, text: str) -> Int32Array:
    """[1, T]: the text as a user's message."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (output,) = llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)
    return np.asarray([output.prompt_token_ids], dtype=np.int32)
