"""What a step is made of: a trace for Chrome (chrome://tracing, ui.perfetto.dev), and a table of
its kernels and the gaps between them beside what the hardware allows.

On a GPU the profiler of torch tells the kernels, inside CUDA graphs too. On a CPU each launch is
timed by itself; there a recorded step is replayed call by call instead of by one, which costs about
a microsecond a call, and that is in the gaps.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pelton.bench import cost
from pelton.bench.machine import Ceilings
from pelton.bench.measure import Side
from pelton.config.engine import EngineConfig
from pelton.core.plan import Int32Array
from pelton.device.timeline import Span, timing

# The kernel that each step begins with: Triton's, and the CPU's.
_FIRST = ("_build", "pelton_build_inputs")
_MAX_OUTPUT = 33
_GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
_PRODUCT = re.compile(r"one_row|few_rows|many_rows|product|nvjet|gemm|gemv|cutlass|linear|block")
_NO_PRODUCT = re.compile(r"splitK?reduce|zero_blocks|blocks_draw", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """num_tokens: of the step. num_context: keys that its rows attend to, in all."""

    num_tokens: int
    num_rows: int
    num_context: float


def step_shape(
    config: EngineConfig, *, batch_size: int, input_len: int, output_len: int
) -> StepShape:
    """Of the steps that such a run has most of: decodes, or where there are none, prefills."""
    rows = min(batch_size, config.scheduler.max_num_seqs)
    if output_len > 1:
        context = rows * (input_len + output_len / 2)
        num_tokens = rows * (1 + config.num_speculative_tokens)
        return StepShape(num_tokens=num_tokens, num_rows=num_tokens, num_context=context)
    tokens = min(batch_size * input_len, config.scheduler.max_num_batched_tokens)
    rows = max(1, tokens // input_len)
    return StepShape(num_tokens=tokens, num_rows=rows, num_context=tokens)


@dataclass(frozen=True, slots=True)
class Line:
    """A place in the step. count: how often it comes (in each layer); seconds, gap: of one of
    these: its own, and from its end to the next one's begin (below 0: they overlap). what: the
    part of the model, where that is known, and its floor in seconds."""

    name: str
    count: int
    seconds: float
    gap: float
    what: str = ""
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Explained:
    """num_steps alike, of `seconds` each: the sum over lines of count * (seconds + gap)."""

    num_steps: int
    seconds: float
    floor: float
    lines: list[Line]


def spans_of(work: Callable[[], object], path: str, device: str) -> list[Span]:
    """Runs `work`, writes the trace to `path`, and returns what the device did, in order."""
    if device.startswith("cuda"):
        return _gpu_spans(work, path)
    with timing() as timeline:
        work()
    events = [
        {"name": name, "ph": "X", "ts": begin * 1e6, "dur": seconds * 1e6, "pid": 1, "tid": 1}
        for name, begin, seconds in timeline.spans
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}) + "\n")
    return timeline.spans


def _gpu_spans(work: Callable[[], object], path: str) -> list[Span]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    profile.export_chrome_trace(path)
    events = json.loads(Path(path).read_text())["traceEvents"]
    spans = [
        Span(event["name"], event["ts"] * 1e-6, event["dur"] * 1e-6)
        for event in events
        if event.get("cat") in _GPU_KINDS and "dur" in event
    ]
    return sorted(spans, key=lambda span: span.begin)


def explain(
    spans: Sequence[Span], config: EngineConfig, ceilings: Ceilings, shape: StepShape
) -> Explained | None:
    """The kind of step that there are most of; None if no step's begin is to be seen."""
    starts = [index for index, span in enumerate(spans) if span.name in _FIRST]
    kinds: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)
    for begin, end in itertools.pairwise([*starts, len(spans)]):
        kinds[tuple(span.name for span in spans[begin:end])].append((begin, end))
    if not kinds:
        return None
    names, steps = max(kinds.items(), key=lambda kind: (len(kind[1]), len(kind[0])))
    if len(steps) > 1 and steps[-1][1] == len(spans):
        steps = steps[:-1]  # of the last one the gap at its end is not known
    durations = [0.0] * len(names)
    gaps = [0.0] * len(names)
    for begin, end in steps:
        for place, index in enumerate(range(begin, end)):
            span = spans[index]
            durations[place] += span.seconds / len(steps)
            if index + 1 < len(spans):
                after = spans[index + 1].begin
                gaps[place] += (after - span.begin - span.seconds) / len(steps)
    lines = _lines(names, durations, gaps, config.model.num_layers)
    lines = _with_floors(lines, config, ceilings, shape)
    floor = _step_floor(config, ceilings, shape)
    return Explained(len(steps), sum(durations) + sum(gaps), floor, lines)


def _lines(
    names: Sequence[str], durations: Sequence[float], gaps: Sequence[float], num_layers: int
) -> list[Line]:
    """One per place; the places of layers that are alike are one."""
    begin, size, count = _period(names, num_layers)
    lines = []
    for place, name in enumerate(names):
        if begin <= place < begin + size * count:
            if place >= begin + size:
                continue
            same = range(place, begin + size * count, size)
            seconds = sum(durations[i] for i in same) / count
            lines.append(Line(name, count, seconds, sum(gaps[i] for i in same) / count))
        else:
            lines.append(Line(name, 1, durations[place], gaps[place]))
    return lines


def _period(names: Sequence[str], num_layers: int) -> tuple[int, int, int]:
    """(begin, size, count): the longest stretch names[begin : begin + size * count] that is `count`
    times the same, of all layers or all but one (the first or the last may differ)."""
    found = (0, 0, 0)
    for count in (num_layers, num_layers - 1):
        if count < 2:
            continue
        for size in range(len(names) // count, 0, -1):
            if size * count <= found[1] * found[2]:
                break
            for begin in range(len(names) - size * count + 1):
                end = begin + size * (count - 1)
                if names[begin:end] == names[begin + size : end + size]:
                    found = (begin, size, count)
                    break
    return found


def _with_floors(
    lines: list[Line], config: EngineConfig, ceilings: Ceilings, shape: StepShape
) -> list[Line]:
    """Names the parts of a dense layer where its four products are to be told apart."""
    layer = [i for i, line in enumerate(lines) if line.count > 1]
    products = [i for i in layer if _is_product(lines[i].name)]
    parts = cost.dense_layer_products(config.model)
    if len(products) != len(parts) or config.model.is_sparse(config.model.num_layers - 1):
        return lines
    found = {
        index: (what, _product_floor(elements, shape.num_tokens, config, ceilings))
        for index, (what, elements) in zip(products, parts.items(), strict=True)
    }
    between = range(products[0] + 1, products[1])
    if between:
        longest = max(between, key=lambda i: lines[i].seconds)
        num_bytes = shape.num_context * cost.kv_bytes(config.model, config.cache.dtype, 1)
        floor = num_bytes / config.model.num_layers / ceilings.read_bytes_per_s
        found[longest] = ("attention", floor)
    behind = range(layer[-1] + 1, len(lines))
    if behind:
        longest = max(behind, key=lambda i: lines[i].seconds)
        elements = config.model.vocab_size * config.model.hidden_size
        found[longest] = ("head", _product_floor(elements, shape.num_rows, config, ceilings))
    return [
        Line(line.name, line.count, line.seconds, line.gap, *found.get(index, ("", 0.0)))
        for index, line in enumerate(lines)
    ]


def _is_product(name: str) -> bool:
    return bool(_PRODUCT.search(name)) and not _NO_PRODUCT.search(name)


def _product_floor(
    elements: int, num_tokens: int, config: EngineConfig, ceilings: Ceilings
) -> float:
    """Seconds of a product of num_tokens rows with a matrix, which is read once."""
    read = elements * cost.bytes_per_element(config) / ceilings.read_bytes_per_s
    return max(read, 2 * elements * num_tokens / ceilings.flops_per_s)


def _step_floor(config: EngineConfig, ceilings: Ceilings, shape: StepShape) -> float:
    elements = cost.weight_bytes(config.model, "float32") // cost.ELEMENT_BYTES["float32"]
    kv = shape.num_context * cost.kv_bytes(config.model, config.cache.dtype, 1)
    products = _product_floor(elements, shape.num_tokens, config, ceilings)
    return products + kv / ceilings.read_bytes_per_s


def of_run(
    path: str | None,
    side: Side,
    prompts: Int32Array,
    output_len: int,
    config: EngineConfig,
    ceilings: Ceilings,
) -> dict[str, Any]:
    """What a benchmark's result has of this: {} without a path. The run is that of `prompts`
    [B, T], with few enough tokens made that the trace stays small."""
    if path is None:
        return {}
    output_len = min(output_len, _MAX_OUTPUT)
    batch_size, input_len = prompts.shape
    shape = step_shape(config, batch_size=batch_size, input_len=input_len, output_len=output_len)
    told = run(path, lambda: side.generate(prompts, output_len), config, ceilings, shape)
    return {"profile": told}


def run(
    path: str,
    work: Callable[[], object],
    config: EngineConfig,
    ceilings: Ceilings,
    shape: StepShape,
) -> dict[str, Any]:
    """Runs `work` once more, watched: writes the trace, prints the table, and returns it."""
    spans = spans_of(work, path, config.device)
    print(f"trace     {path}")
    explained = explain(spans, config, ceilings, shape)
    if explained is None:
        print(
            f"profile   {len(spans)} spans, and no step's begin among them: only steps of the "
            "triton and native kernels can be told apart"
        )
        return {"trace": path, "num_spans": len(spans)}
    for text in tell(explained):
        print(text)
    return {
        "trace": path,
        "num_steps": explained.num_steps,
        "step_us": explained.seconds * 1e6,
        "floor_us": explained.floor * 1e6,
        "lines": [
            {
                "kernel": line.name,
                "count": line.count,
                "us": line.seconds * 1e6,
                "gap_us": line.gap * 1e6,
                "part": line.what,
                "floor_us": line.floor * 1e6,
            }
            for line in explained.lines
        ],
    }


def tell(explained: Explained) -> list[str]:
    """For people; microseconds."""
    kernels = sum(line.count * line.seconds for line in explained.lines)
    gaps = sum(line.count * line.gap for line in explained.lines)
    num_kernels = sum(line.count for line in explained.lines)
    texts = [
        f"a step    {explained.seconds * 1e6:.1f} us, the mean of {explained.num_steps} alike: "
        f"{num_kernels} kernels {kernels * 1e6:.1f}, gaps {gaps * 1e6:.1f}; "
        f"floor {explained.floor * 1e6:.1f}",
        f"{'times':>5} {'us each':>9} {'gap':>7} {'floor':>9} {'us in all':>10}  kernel",
    ]
    for line in explained.lines:
        floor = f"{line.floor * 1e6:.2f}" if line.floor else "-"
        in_all = line.count * (line.seconds + line.gap) * 1e6
        what = f"{line.what}: " if line.what else ""
        texts.append(
            f"{line.count:5} {line.seconds * 1e6:9.2f} {line.gap * 1e6:7.2f} {floor:>9} "
            f"{in_all:10.1f}  {what}{line.name[:60]}"
        )
    return texts
