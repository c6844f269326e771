from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pelton.metrics.prometheus import ENGINE_NAMES, EngineNumbers, ServerMetrics
from pelton.metrics.step_sizes import StepSizes

ROOT = Path(__file__).resolve().parents[2]


def make(prefix: str, steps: tuple[int, ...] = ()) -> ServerMetrics:
    sizes = StepSizes()
    for num_tokens in steps:
        sizes.add(num_tokens)
    numbers = EngineNumbers(
        values={name: number + 1.0 for number, name in enumerate(ENGINE_NAMES)},
        step_sizes=sizes.counts if steps else (),
        num_step_tokens=sum(steps),
    )
    return ServerMetrics(
        model_name="tiny",
        max_model_len=4096,
        engine=lambda: numbers,
        cache_info={"block_size": "16"},
        prefix=prefix,
    )


def test_everything_is_exposed_under_the_prefix() -> None:
    for prefix in ("pelton", "vllm"):
        metrics = make(prefix)
        metrics.prompt_begun(7, 2)
        metrics.finished("stop")
        metrics.first_token(0.5)
        text = metrics.expose().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert all(name.startswith(f"{prefix}:") for name in families)
        for name in ENGINE_NAMES:
            (sample,) = families[f"{prefix}:{name}"].samples
            assert sample.labels == {"model_name": "tiny", "engine": "0"}
            assert sample.value == ENGINE_NAMES.index(name) + 1.0
        assert families[f"{prefix}:prompt_tokens"].samples[0].value == 7
        assert families[f"{prefix}:prompt_tokens_cached"].samples[0].value == 2
        assert metrics.num_prompt_tokens == 7
        (success,) = families[f"{prefix}:request_success"].samples
        assert success.labels["finished_reason"] == "stop"
        assert families[f"{prefix}:cache_config_info"].samples[0].labels["block_size"] == "16"
        buckets = families[f"{prefix}:request_prompt_tokens"].samples
        edges = [sample.labels["le"] for sample in buckets if "le" in sample.labels]
        assert edges[:4] == ["1.0", "2.0", "5.0", "10.0"]
        assert edges[-2:] == ["2000.0", "+Inf"]


def test_steps_are_a_histogram_as_vllm_has_it() -> None:
    """iteration_tokens_total ends as a counter does, and is none."""
    for steps in ((), (1, 2, 8, 9, 64, 20000)):
        text = make("vllm", steps).expose().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        family = families["vllm:iteration_tokens_total"]
        assert family.type == "histogram"
        found = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
        assert found.pop("vllm:iteration_tokens_total_sum") == sum(steps)
        assert found.pop("vllm:iteration_tokens_total_count") == len(steps)
        assert list(found)[:4] == ["1.0", "8.0", "16.0", "32.0"]
        for edge, value in found.items():
            assert value == sum(size <= float(edge) for size in steps), edge


def test_who_waits_and_where_prompts_came_from() -> None:
    metrics = make("pelton")
    metrics.prompt_begun(7, 2)
    text = metrics.expose().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (waiting,) = families["pelton:num_requests_waiting_by_reason"].samples
    assert waiting.labels["reason"] == "capacity"
    assert waiting.value == families["pelton:num_requests_waiting"].samples[0].value
    by_source = families["pelton:prompt_tokens_by_source"].samples
    assert {sample.labels["source"]: sample.value for sample in by_source} == {
        "local_compute": 5,
        "local_cache_hit": 2,
    }


def test_two_servers_in_one_process_do_not_mix() -> None:
    one, other = make("pelton"), make("pelton")
    one.finished("stop")
    assert b"finished_reason" not in other.expose()


def test_the_dashboard_asks_for_what_there_is() -> None:
    text = make("pelton").expose().decode()
    known = set(re.findall(r"^(pelton:\w+)", text, re.MULTILINE)) | {"pelton:request_success_total"}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"pelton:\w+", target["expr"])
    ]
    assert len(set(asked)) >= 12
    assert set(asked) <= known
