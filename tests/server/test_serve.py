"""`pelton serve` as a process: what clients, signals and dying engines see."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.processes import (
    ServeProcess,
    chat_model,
    gone_within,
    serving,
)

KEY = "sk-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """With a key, a name, and a configuration file whose log level a flag overrides."""
    config = tmp_path_factory.mktemp("config") / "serve.yaml"
    config.write_text("served-model-name: tiny\nlog_level: debug\nmax-num-seqs: 8\n")
    with serving(
        "--config", str(config), "--log-level", "info", "--batch-invariant", PELTON_API_KEY=KEY
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_ready_table(server: ServeProcess) -> None:
    for words in [
        r"model +tiny-chat \(LlamaForCausalLM\), called tiny$",
        r"dtype +float32 on cpu$",
        r"context +256 tokens$",
        r"KV cache +\d+ tokens, room for \d+ requests of full length$",
        r"at a time +8 answers$",
        r"started in +[\d.]+ s: .*load weights [\d.]+ s",
        r"API keys +1$",
        r"URL +http://127\.0\.0\.1:\d+$",
    ]:
        assert re.search(words, server.log, re.MULTILINE), words
    assert "DEBUG" not in server.log


def test_a_head_without_an_end_is_cut_off(server: ServeProcess) -> None:
    """A line that grows, and lines without number: refused at 64 KB, and others are served."""
    port = int(server.url.rpartition(":")[2])
    for piece in (b"a" * 60_000, b"X-Line: " + b"a" * 1000 + b"\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
            with contextlib.suppress(ConnectionError):
                for _ in range(400):
                    connection.sendall(piece)
                assert b" 431 " in connection.recv(100)
            with contextlib.suppress(ConnectionError):
                while connection.recv(1000):
                    pass
        assert httpx.get(f"{server.url}/health", timeout=2).status_code == 200


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="tiny", prompt="The sea", max_tokens=12, temperature=0, logprobs=2
    )
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (7, 12)
    assert choice.logprobs
    assert choice.logprobs.token_logprobs
    assert len(choice.logprobs.token_logprobs) == 12
    assert choice.logprobs.top_logprobs
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)
    stream = client.completions.create(
        model="tiny", prompt="The sea", max_tokens=12, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == choice.text
    ids = [*b"The sea"]
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=12, temperature=0)
    assert by_ids.choices[0].text == choice.text
    both = client.completions.create(
        model="tiny", prompt=["The sea", "x"], max_tokens=12, temperature=0
    )
    assert both.choices[0].text == choice.text


def test_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=10,
        temperature=0.9,
        seed=3,
        logprobs=True,
        top_logprobs=3,
    )
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.logprobs
    assert choice.logprobs.content
    raw = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert raw.replace(b"</s>", b"").decode("utf-8", "replace") == choice.message.content
    for token in choice.logprobs.content:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert token.logprob <= values[0]
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        max_completion_tokens=10,
        temperature=0.9,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert last.usage
    assert whole.usage
    assert last.usage.total_tokens == whole.usage.total_tokens
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content


def test_several_answers(client: openai.OpenAI) -> None:
    """Answer i is that of a request with seed + i."""
    three = client.completions.create(
        model="tiny", prompt="Once", n=3, temperature=1, seed=7, max_tokens=8
    )
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    for number, choice in enumerate(three.choices):
        one = client.completions.create(
            model="tiny", prompt="Once", temperature=1, seed=7 + number, max_tokens=8
        )
        assert one.choices[0].text == choice.text
    assert three.usage
    assert three.usage.prompt_tokens == 4


def test_stop(client: openai.OpenAI) -> None:
    """Case 22: nothing of the stop string is shown, and usage counts its tokens."""
    free = client.completions.create(
        model="tiny", prompt="Once", temperature=0, max_tokens=30
    ).choices[0]
    whole = [piece for piece in free.text if piece != "\ufffd"]
    stop = whole[3]
    body = {"model": "tiny", "prompt": "Once", "temperature": 0, "max_tokens": 30, "stop": stop}
    cut = client.completions.create(**body)  # type: ignore[call-overload]
    assert cut.choices[0].text == free.text[: free.text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].stop_reason == stop
    assert 0 < cut.usage.completion_tokens <= 30
    kept = client.completions.create(  # type: ignore[call-overload]
        **body, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == cut.choices[0].text + stop


def test_echo_with_logprobs_of_the_prompt(client: openai.OpenAI) -> None:
    """Case 35: offsets go on from the prompt to the answer, streamed or not."""
    body = {"model": "tiny", "prompt": "Zoé", "echo": True, "logprobs": 1, "max_tokens": 3}
    body |= {"temperature": 0}
    whole = client.completions.create(**body).choices[0]  # type: ignore[call-overload]
    assert whole.text.startswith("Zoé")
    assert whole.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in whole.logprobs.token_logprobs[1:])
    assert whole.logprobs.text_offset[:5] == [0, 1, 2, 2, 3]
    assert len(whole.logprobs.tokens) == 7
    offsets = []
    for chunk in client.completions.create(**body, stream=True):  # type: ignore[call-overload]
        offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == whole.logprobs.text_offset
    alone = client.completions.create(**{**body, "max_tokens": 0})  # type: ignore[call-overload]
    assert alone.choices[0].text == "Zoé"
    assert alone.choices[0].logprobs.token_logprobs == whole.logprobs.token_logprobs[:4]
    assert alone.usage.completion_tokens == 0


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "A prompt that is longer than one block of the cache, certainly."
    for expected in (0, len(prompt) - 1 - (len(prompt) - 1) % 16):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert answer.usage
        details = answer.usage.prompt_tokens_details
        assert details
        assert details.cached_tokens == expected


def test_errors(client: openai.OpenAI, server: ServeProcess) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny", prompt="x", temperature=900)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-4", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 300)
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-no", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_metrics_and_log(client: openai.OpenAI, server: ServeProcess) -> None:
    client.completions.create(model="tiny", prompt="A secret", max_tokens=2, user="me")
    text = httpx.get(f"{server.url}/metrics").text
    for name in ("generation_tokens_total", "prompt_tokens_total", "request_success_total"):
        values = [line for line in text.splitlines() if line.startswith(f"pelton:{name}")]
        assert float(values[0].split()[-1]) > 0, name
    assert re.search(r"POST /v1/completions: 8 \+ 2 tokens, .*length, for 'me'", server.log)
    assert "secret" not in server.log


@contextlib.contextmanager
def open_stream(running: ServeProcess, max_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of an answer that has begun. They are read when they are asked for."""
    url, _, path = running.url.partition("+unix://")
    transport = httpx.HTTPTransport(uds=path) if path else None
    body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(transport=transport, base_url="http://x" if path else url, timeout=60) as one,
        one.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def test_first_interrupt_drains_and_exit_code_is_0() -> None:
    """What runs is finished. Who comes meanwhile, on a new connection or an open one, is told to
    go elsewhere; those who watch are answered to the end."""
    with serving("--log-prompts", model=chat_model(8192)) as running:
        none_kept = httpx.Limits(max_keepalive_connections=0)
        with (
            httpx.Client(base_url=running.url, timeout=30) as open_before,
            httpx.Client(base_url=running.url, timeout=30, limits=none_kept) as each_new,
            open_stream(running, 2400) as lines,
        ):
            assert open_before.get("/health").status_code == 200
            engine = running.engine_pid()
            running.process.send_signal(signal.SIGINT)
            while (health := each_new.get("/health")).status_code == 200:
                time.sleep(0.005)
            refused = [
                health,
                open_before.get("/health"),
                open_before.post("/v1/completions", json={"prompt": "x"}),
                each_new.post("/v1/completions", json={"prompt": "x"}),
            ]
            for response in refused:
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) > 0
                assert response.json()["error"]["type"] == "service_unavailable_error"
            assert each_new.get("/load").json()["server_load"] >= 1
            assert [*lines][-1] == "data: [DONE]"
        assert running.wait() == 0
        assert gone_within(engine, 5)
        assert "prompt: 'Hello'" in running.log
        assert "Traceback" not in running.log


def test_second_interrupt_ends_at_once() -> None:
    """Clients are told, and not just cut off."""
    path = f"/tmp/pelton-test-{os.getpid()}.sock"
    flags = ["--uds", path, "--max-num-seqs", "4"]
    with serving(*flags, model=chat_model(8192)) as running:
        engine = running.engine_pid()
        with (
            open_stream(running, 8000) as lines,
            httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=30) as watcher,
        ):
            running.process.send_signal(signal.SIGINT)
            while watcher.get("http://x/health").status_code == 200:
                time.sleep(0.005)
            assert running.process.poll() is None
            running.process.send_signal(signal.SIGINT)
            last = ""
            with contextlib.suppress(httpx.HTTPError):
                for line in lines:
                    last = line
            assert "shutting down" in last
        assert running.wait(10) == 130
        assert gone_within(engine, 5)
        assert "Traceback" not in running.log
        assert not Path(path).exists()


def test_killed_engine_ends_the_server_with_its_last_words() -> None:
    with serving() as running:
        engine = running.engine_pid()
        with open_stream(running, 240) as lines:
            os.kill(engine, signal.SIGKILL)
            last = [*lines][-1]
            assert '"error"' in last or "[DONE]" in last
        assert running.wait(5) == 1
        assert "SIGKILL" in running.log.splitlines()[-1]


def test_killed_engine_ends_a_server_that_is_stopping() -> None:
    with serving(model=chat_model(8192)) as running:
        engine = running.engine_pid()
        with open_stream(running, 8000) as lines:
            running.process.send_signal(signal.SIGTERM)
            while httpx.get(f"{running.url}/health").status_code == 200:
                time.sleep(0.005)
            os.kill(engine, signal.SIGKILL)
            assert '"error"' in [*lines][-1]
        assert running.wait(10) == 1
        assert "SIGKILL" in running.log.splitlines()[-1]


def test_health_tells_of_a_killed_engine_within_a_second() -> None:
    """Though nobody asks it for anything."""
    with serving() as running, httpx.Client(base_url=running.url, timeout=5) as client:
        assert client.get("/health").status_code == 200
        os.kill(running.engine_pid(), signal.SIGKILL)
        end = time.monotonic() + 1
        while (health := client.get("/health")).status_code == 200:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert health.status_code == 503
        assert health.json()["error"]["message"] == "The engine has stopped."
        assert client.get("/stats").json()["is_alive"] is False
        assert running.wait(5) == 1


def test_a_full_disk_under_the_log() -> None:
    """Lines are lost, and nothing else."""
    path = f"/tmp/pelton-full-{os.getpid()}.sock"
    command = [sys.executable, "-m", "pelton.cli.main", "serve", str(chat_model())]
    command += ["--uds", path, "--num-threads", "1", "--log-level", "debug"]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=full, stderr=full) as process,
        httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=30) as client,
    ):
        try:
            end = time.monotonic() + 60
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get("http://x/health").status_code == 200:
                        break
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.1)
            for _ in range(20):
                body = {"prompt": "Hi", "max_tokens": 3}
                assert client.post("http://x/v1/completions", json=body).status_code == 200
                assert client.post("http://x/v1/completions", json={}).status_code == 400
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_as_many_connections_as_the_system_allows() -> None:
    """Where 200 files are allowed until one asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with serving() as running:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            port = int(running.url.rpartition(":")[2])
            with contextlib.ExitStack() as stack:
                for _ in range(400):
                    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
                    stack.enter_context(connection)
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b" 200 " in connection.recv(1000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
