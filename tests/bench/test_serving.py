"""`pelton bench serve` against the real server over a scripted engine."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.scripted_engine import scripted_llm, text_script
from support.serving import run, served

from pelton.bench.load import make_requests
from pelton.bench.options import ServingOptions
from pelton.bench.outcomes import Outcome
from pelton.bench.serving import _Counter, measure, tell
from pelton.bench.timeline import timeline_svg
from pelton.errors import EngineError

TEXT = "One two three four five six seven eight nine ten."


def measured(
    step_size: int = 1, text: str = TEXT, keys: tuple[str, ...] = (), **options: Any
) -> tuple[dict[str, Any], list[Outcome]]:
    async def main() -> Any:
        llm = scripted_llm(text_script(text), delay=0.002, step_size=step_size)
        async with served(llm, keys=keys) as server:
            chosen = ServingOptions(url=f"http://127.0.0.1:{server.port}/v1", **options)
            return await measure(chosen, make_requests(chosen))

    found: tuple[dict[str, Any], list[Outcome]] = run(main)
    return found


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("step_size", [1, 3])
def test_tokens_are_counted_whatever_the_chunks(step_size: int, continuous: bool) -> None:
    result, outcomes = measured(
        step_size, num_prompts=9, max_concurrency=4, input_len=5, continuous_usage=continuous
    )
    num_tokens = outcomes[0].num_tokens
    assert num_tokens >= 12
    assert [one.num_tokens for one in outcomes] == [num_tokens] * 9
    assert result["total_output_tokens"] == 9 * num_tokens
    assert result["total_input_tokens"] == 45
    assert result["peak_concurrency"] == 4
    assert ("each chunk" in result["token_counts"]) == continuous
    assert (len(outcomes[0].chunks) < num_tokens) == (step_size > 1)
    assert len(outcomes[0].itl) == num_tokens - outcomes[0].chunks[0][1]
    assert sum(result["output_tokens_by_second"]) == 9 * num_tokens
    json.dumps(result)


def test_chat_with_a_key_and_a_rate(tmp_path: Path) -> None:
    dataset = tmp_path / "d.jsonl"
    dataset.write_text(json.dumps({"prompt": "Hello"}))
    result, outcomes = measured(
        keys=("k",),
        api_key="k",
        endpoint="chat",
        dataset=str(dataset),
        num_prompts=5,
        request_rate=200.0,
        goodput="ttft:10000",
    )
    assert result["completed"] == 5
    assert result["goodput_share"] == 1
    sent = [one.sent for one in outcomes]
    assert sent == sorted(sent)
    assert all(one.sent >= one.due for one in outcomes)
    lines: list[str] = []
    tell(result, lines.append)
    for words in ("5 done, 0 failed", "TTFT", "p99", "goodput"):
        assert any(words in line for line in lines)
    root = ElementTree.fromstring(timeline_svg(outcomes))
    assert sum(element.tag.endswith("circle") for element in root.iter()) == 10


def test_servers_that_refuse() -> None:
    with pytest.raises(EngineError, match="API key"):
        measured(keys=("k",), num_prompts=1)
    with pytest.raises(EngineError, match="'nobody' is not served"):
        measured(num_prompts=1, model_name="nobody")


def test_streams_that_fail_are_no_successes() -> None:
    for events, words in [
        ([b'{"error": {"message": "it broke"}}'], "it broke"),
        ([b'{"choices": [{"text": "x"}]}'], "without [DONE]"),
        ([b"{", b"[DONE]"], "no JSON"),
        ([b'{"choices": [{"text": ""}]}', b"[DONE]"], "without tokens"),
    ]:
        counter, outcome = _Counter(None), Outcome(0.0)
        for event in events:
            counter.take(1.0, event)
        counter.finish(outcome)
        assert words in outcome.error
