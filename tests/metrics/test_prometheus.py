from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pelton.metrics.prometheus import ENGINE_NAMES, ServerMetrics

ROOT = Path(__file__).resolve().parents[2]


def make(prefix: str) -> ServerMetrics:
    return ServerMetrics(
        model_name="tiny",
        max_model_len=4096,
        engine=lambda: {name: number + 1.0 for number, name in enumerate(ENGINE_NAMES)},
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
