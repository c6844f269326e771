"""`pelton bench serve` against the real server over a scripted engine."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.other_server import OtherServer, running
from support.scripted_engine import scripted_llm, smollm2, text_script
from support.serving import run, served
from support.texts import byte_backend

from pelton.bench.load import make_requests
from pelton.bench.options import ServingOptions
from pelton.bench.outcomes import Outcome
from pelton.bench.serving import _begun, _Counter, measure, tell
from pelton.bench.timeline import timeline_svg
from pelton.errors import ConfigError, EngineError

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
    # Whoever waits for room is due when there is some: the client is not late for its own cap.
    assert len({one.due for one in outcomes}) == 6
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
    # A timer of the event loop may be up to a millisecond early.
    assert all(one.sent >= one.due - 0.002 for one in outcomes)
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


TOKENS = [" Wör", "ld", " 😊", " and", " so", " on", "."]


def measured_elsewhere(
    server: OtherServer, tls: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, Any], list[Outcome]]:
    with running(server, **(tls or {})) as url:
        chosen = ServingOptions(url=url, num_prompts=3, input_len=4, output_len=7, **options)

        async def main() -> Any:
            return await measure(chosen, make_requests(chosen))

        found: tuple[dict[str, Any], list[Outcome]] = run(main)
        return found


@pytest.mark.parametrize("usage", ["each", "last", "end"])
@pytest.mark.parametrize(("per_event", "piece", "line_end"), [(1, 1000, "\n"), (3, 5, "\r\n")])
def test_tokens_of_other_servers_are_those_they_count(
    usage: str, per_event: int, piece: int, line_end: str
) -> None:
    """Whatever the chunks: llama.cpp's server tells usage with the last text, and counting one
    for each chunk before it gave twice what there was."""
    server = OtherServer(TOKENS, per_event, piece, usage, line_end)
    result, outcomes = measured_elsewhere(server)
    assert [one.num_tokens for one in outcomes] == [7] * 3
    assert result["total_output_tokens"] == 21
    assert result["total_input_tokens"] == 15
    assert ("each chunk" in result["token_counts"]) == (usage == "each")
    exact = [1] * 7 if per_event == 1 else [3, 3, 1]
    even = [1] * 7 if per_event == 1 else [3, 2, 2]
    counts = [count for _, count in outcomes[0].chunks if count]
    assert counts == (exact if usage == "each" else even)
    assert result["server"]["version"] is None  # a page is none


def test_a_server_that_counts_nothing_is_counted_by_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    byte_backend().save(str(folder / "tokenizer.json"))
    num_bytes = len("".join(TOKENS).encode())
    for per_event in (1, 3):
        for says_done in (True, False):
            server = OtherServer(
                TOKENS, per_event, says_done=says_done, knows_stream_options=False, key="k"
            )
            result, outcomes = measured_elsewhere(server, api_key="k", tokenizer=str(folder))
            assert [one.num_tokens for one in outcomes] == [num_bytes] * 3
            assert outcomes[0].chunks[0][1] == len("".join(TOKENS[:per_event]).encode())
            assert "tokenizer" in result["token_counts"]
            assert "stream_options" not in server.bodies[-1]
    with pytest.raises(ConfigError, match="does not count tokens"):
        measured_elsewhere(OtherServer(TOKENS))


def test_tokens_begin_in_the_part_that_has_their_first_byte() -> None:
    tokenizer = smollm2()[2]
    text = "The quick brown fox, and so on."
    for cuts in ([1] * len(text), [len(text)], [5, 0, 9, 1, 99], [0, 3, 99]):
        parts, place = [], 0
        for cut in cuts:
            parts.append(text[place : place + cut])
            place += cut
        counts = _begun(parts, tokenizer)
        assert sum(counts) == len(tokenizer.encode(text, add_special_tokens=False))
        first = next(index for index, part in enumerate(parts) if part)
        assert counts[first] >= 1
    assert _begun([], tokenizer) == []


def test_what_other_servers_say_when_they_refuse() -> None:
    with pytest.raises(EngineError, match="status 401: Wrong key"):
        measured_elsewhere(OtherServer(TOKENS, usage="end", key="k"), api_key="other")
    with pytest.raises(EngineError, match="status 503: Loading model"):
        measured_elsewhere(OtherServer(TOKENS, is_loading=True))
    with pytest.raises(EngineError, match="no stream of events"):
        measured_elsewhere(OtherServer(TOKENS, streams=False))


def test_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    words += " -addext subjectAltName=DNS:localhost"
    subprocess.run(
        ["openssl", *words.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    tls = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    server = OtherServer(TOKENS, usage="end", key="k")
    with pytest.raises(EngineError, match="its certificate cannot be trusted: self-signed"):
        measured_elsewhere(server, tls, api_key="k")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    result, _ = measured_elsewhere(server, tls, api_key="k")
    assert result["completed"] == 3
