"""A step's table: sums to the step's time, knows its layers, and its parts' floors."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from bench.test_session import CONFIG
from support.tiny import tiny_llama

from pelton.bench import cost, machine, measure, profile
from pelton.bench.profile import StepShape, explain, step_shape, tell
from pelton.config.quant import QuantConfig
from pelton.device.timeline import Span
from pelton.engine.llm import LLM

CEILINGS = machine.Ceilings(read_bytes_per_s=1e9, flops_per_s=1e12)
MODEL = dataclasses.replace(CONFIG.model, num_layers=3)
CONFIG3 = dataclasses.replace(CONFIG, model=MODEL)
LAYER = ["linear", "store", "decode", "linear", "linear", "linear"]
STEP = ["_build", "gather", *LAYER * 3, "draw", "advance"]
SHAPE = StepShape(num_tokens=2, num_rows=2, num_context=40.0)


def _spans(*steps, gap=1e-6, seconds=2e-6):
    """Each kernel takes `seconds` and the n-th of a step n tenths of a microsecond more."""
    spans, now = [], 5.0
    for step in steps:
        for number, name in enumerate(step):
            took = seconds + number * 1e-7
            spans.append(Span(name, now, took))
            now += took + gap
    return spans


def test_lines_sum_to_the_step():
    spans = _spans(["_build", "prefill"], STEP, STEP, STEP)
    explained = explain(spans, CONFIG3, CEILINGS, SHAPE)
    assert explained.num_steps == 2, "the last one's end is not known"
    begin = [span.begin for span in spans if span.name == "_build"]
    assert explained.seconds == pytest.approx(begin[2] - begin[1])
    total = sum(line.count * (line.seconds + line.gap) for line in explained.lines)
    assert total == pytest.approx(explained.seconds)


def test_layers_are_one():
    explained = explain(_spans(STEP, STEP), CONFIG3, CEILINGS, SHAPE)
    assert [line.name for line in explained.lines] == [
        "_build",
        "gather",
        *LAYER,
        "draw",
        "advance",
    ]
    assert [line.count for line in explained.lines] == [1, 1, *[3] * 6, 1, 1]
    mean = 2e-6 + (2 + 8 + 14) / 3 * 1e-7
    assert explained.lines[2].seconds == pytest.approx(mean)


def test_a_first_layer_of_its_own():
    step = ["_build", "first", *LAYER * 2, "draw"]
    explained = explain(_spans(step, step), CONFIG3, CEILINGS, SHAPE)
    assert [line.count for line in explained.lines] == [1, 1, *[2] * 6, 1]


def test_floors_of_a_dense_layer():
    explained = explain(_spans(STEP, STEP), CONFIG3, CEILINGS, SHAPE)
    parts = {line.what: line for line in explained.lines if line.what}
    assert list(parts) == ["qkv", "attention", "o", "gate_up", "down", "head"]
    assert parts["attention"].name == "decode", "the longest between the first two products"
    assert parts["qkv"].floor == pytest.approx((2 + 2) * 4 * 8 * 4 / 1e9)
    kv = 40 * cost.kv_bytes(MODEL, "float32", 1) / 3 / 1e9
    assert parts["attention"].floor == pytest.approx(kv)
    assert parts["head"].floor == pytest.approx(20 * 8 * 4 / 1e9)
    in_all = sum(line.count * line.floor for line in explained.lines)
    assert in_all == pytest.approx(explained.floor)


def test_many_rows_are_bound_by_operations():
    shape = StepShape(num_tokens=10**6, num_rows=1, num_context=0.0)
    explained = explain(_spans(STEP, STEP), CONFIG3, CEILINGS, shape)
    qkv = next(line for line in explained.lines if line.what == "qkv")
    assert qkv.floor == pytest.approx(2 * 16 * 8 * 1e6 / 1e12)


def test_no_floors_are_guessed():
    step = ["_build", *["linear", "decode", "linear"] * 3, "draw"]
    explained = explain(_spans(step, step), CONFIG3, CEILINGS, SHAPE)
    assert all(line.floor == 0 for line in explained.lines)
    assert explained.floor > 0


def test_weights_that_stay_quantised_are_fewer_bytes():
    num_elements = cost.weight_bytes(MODEL, "float32") // 4
    half = QuantConfig(scheme="gguf", num_elements=num_elements // 2, num_bytes=num_elements // 4)
    config = dataclasses.replace(CONFIG3, quantization=half)
    assert cost.bytes_per_element(CONFIG3) == 4
    assert cost.bytes_per_element(config) == pytest.approx((4 + 0.5) / 2)
    all_of_it = dataclasses.replace(half, num_elements=2 * num_elements, num_bytes=num_elements)
    config = dataclasses.replace(CONFIG3, quantization=all_of_it)
    assert cost.bytes_per_element(config) == 0.5, "the embedding counts there, and not here"


def test_overlap_is_a_gap_below_zero():
    explained = explain(_spans(STEP, STEP, gap=-5e-7), CONFIG3, CEILINGS, SHAPE)
    assert explained.lines[0].gap == pytest.approx(-5e-7)
    total = sum(line.count * (line.seconds + line.gap) for line in explained.lines)
    assert total == pytest.approx(explained.seconds)


def test_no_step_to_be_seen():
    assert explain(_spans(["a", "b"]), CONFIG3, CEILINGS, SHAPE) is None


def test_shapes():
    decode = step_shape(CONFIG, batch_size=9, input_len=10, output_len=4)
    assert decode == StepShape(num_tokens=4, num_rows=4, num_context=4 * 12.0), "4 rows fit"
    prefill = step_shape(CONFIG, batch_size=3, input_len=32, output_len=1)
    assert prefill == StepShape(num_tokens=64, num_rows=2, num_context=64), "64 tokens fit"


def test_the_text():
    first, header, *lines = tell(explain(_spans(STEP, STEP), CONFIG3, CEILINGS, SHAPE))
    assert "the mean of 1 alike: 22 kernels" in first
    assert len(lines) == 10
    assert lines[2].endswith("qkv: linear")
    assert header.index("kernel") == lines[0].index("_build")


def test_an_engine_on_the_cpu(tmp_path):
    llm = LLM(str(tiny_llama()), num_threads=1, max_model_len=128, enable_prefix_caching=False)
    side = measure.EngineSide(llm)
    prompts = measure.random_prompts(1000, 2, 8, 0)
    path = tmp_path / "trace.json"
    told = profile.of_run(str(path), side, prompts, 12, llm.config, CEILINGS)["profile"]
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    if "lines" not in told:
        pytest.skip("no C kernels on this machine")
    assert told["num_steps"] >= 9, "one prefill, and decodes"
    counts = [line["count"] for line in told["lines"]]
    assert llm.config.model.num_layers in counts
    total = sum(one["count"] * (one["us"] + one["gap_us"]) for one in told["lines"])
    assert total == pytest.approx(told["step_us"])
    assert profile.of_run(None, side, prompts, 12, llm.config, CEILINGS) == {}


@pytest.mark.gpu
def test_an_engine_on_a_gpu(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    llm = LLM(str(tiny_llama()), device="cuda", max_model_len=128, kv_cache_memory_bytes=2**24)
    side = measure.EngineSide(llm)
    prompts = measure.random_prompts(1000, 2, 8, 0)
    path = tmp_path / "trace.json"
    told = profile.of_run(str(path), side, prompts, 12, llm.config, CEILINGS)["profile"]
    assert told["num_steps"] >= 9
    total = sum(one["count"] * (one["us"] + one["gap_us"]) for one in told["lines"])
    assert total == pytest.approx(told["step_us"])
