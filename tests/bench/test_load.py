"""What is sent, and when."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pelton.bench.load import make_requests, send_times
from pelton.bench.options import ServingOptions
from pelton.errors import ConfigError


def test_random_ids() -> None:
    asked = make_requests(ServingOptions(num_prompts=3, input_len=50, vocab_size=120, seed=1))
    assert [len(one.prompt) for one in asked] == [50] * 3
    ids = [token for one in asked for token in one.prompt]
    assert min(ids) == 100  # type: ignore[type-var]
    assert max(ids) == 119  # type: ignore[type-var]
    assert asked[0].body(ServingOptions(ignore_eos=True, extra_body={"top_k": 3})) == {
        "prompt": asked[0].prompt,
        "max_tokens": 64,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "top_k": 3,
    }


def test_datasets(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    chat = [{"role": "user", "content": "q"}]
    lines.write_text(
        json.dumps({"prompt": "p", "output_len": 3}) + "\n\n" + json.dumps({"messages": chat})
    )
    options = ServingOptions(dataset=str(lines), endpoint="chat", num_prompts=3, output_len=9)
    asked = make_requests(options)
    assert [one.body(options)["messages"][0]["content"] for one in asked] == ["p", "q", "p"]
    assert [one.output_len for one in asked] == [3, 9, 3]
    sharegpt = tmp_path / "b.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    sharegpt.write_text(json.dumps([{"id": "1", "conversations": turns}]))
    assert make_requests(ServingOptions(dataset=str(sharegpt), num_prompts=1))[0].prompt == "hi"
    for text, words in [("{", "not JSON"), ("", "no prompts"), ('{"text": "x"}', "entry 1")]:
        lines.write_text(text)
        with pytest.raises(ConfigError, match=words):
            make_requests(ServingOptions(dataset=str(lines)))


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps(burstiness: float) -> None:
    options = ServingOptions(num_prompts=20_000, request_rate=10, burstiness=burstiness)
    gaps = np.diff(send_times(options))
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.05)
    # Of a gamma distribution: deviation / mean = 1 / sqrt(shape).
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert set(send_times(ServingOptions(num_prompts=3))) == {0.0}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"request_rate": 0.0}, "request_rate must be above 0"),
        ({"goodput": "ttft"}, "goodput must be as in"),
        ({"goodput": "x:1"}, "goodput must be as in"),
        ({"plot": "r.png"}, "plot must end with .svg, the one kind there is; got 'r.png'"),
        ({"percentiles": "101"}, "percentiles must be"),
        ({"endpoint": "chats"}, "endpoint must be"),
        ({"endpoint": "chat"}, "name a dataset"),
        ({"num_prompts": 0}, "num_prompts must be at least 1"),
    ],
)
def test_options_that_measure_nothing(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServingOptions(**options)  # type: ignore[arg-type]


def test_limits() -> None:
    options = ServingOptions(goodput="ttft:200, e2el:3000")
    assert options.limits() == {"ttft": 0.2, "e2e": 3.0}
