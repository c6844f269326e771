"""Large prompts are nobody else's trouble."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.folders import new_folder
from support.processes import serving, waited_for_processor
from support.scripted_engine import scripted_llm, smollm2
from support.serving import served_in_thread
from support.tiny import tiny_llama

from pelton.checkpoint.embedded import embedded_model

MOST = 1_000_000  # characters; more are not tokenized
WORDS = "Turbines number 12 turn; water runs, and light is made of it. "


@functools.cache
def wordy_model() -> Path:
    """A tiny random Llama with SmolLM2's tokenizer and a context of 8192 tokens."""
    tokenizer = smollm2()[2]
    weights = tiny_llama(
        vocab_size=49152,
        max_position_embeddings=8192,
        num_hidden_layers=1,
        tie_word_embeddings=True,
    )
    folder = new_folder("wordy") / "wordy"
    shutil.copytree(weights, folder)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


class Clock:
    """Wall time less what the main threads of some processes waited for a processor meanwhile: the
    machine's other users are not the server's fault. Waiting for the GIL is, and counts.

    longest: between `begin` and `end`, in seconds. longest_wall: with those waits.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.longest, self.longest_wall = 0.0, 0.0
        self.begin()

    def begin(self) -> None:
        self._began, self._waited = self._now()

    def end(self) -> None:
        now, waited = self._now()
        wall = now - self._began
        self.longest = max(self.longest, wall - (waited - self._waited))
        self.longest_wall = max(self.longest_wall, wall)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), sum(map(waited_for_processor, self._pids))

    def __str__(self) -> str:
        return f"{self.longest:.3f} s at most, {self.longest_wall:.3f} s with waits for a processor"


async def watch(
    url: str,
    num_prompts: int,
    num_bytes: int,
    *,
    num_tokens: int = 2000,
    server: int | None = None,
    engine: int | None = None,
) -> tuple[Clock, Clock, list[int]]:
    """Sends prompts of `num_bytes` at once, a part of them to be refused by their length alone, a
    part to be tokenized and cut, and a part as chats. Returns the times that /health took and the
    gaps in a stream meanwhile, and the prompts' statuses.

    server, engine: their processes, other than this one."""
    text = (WORDS * (num_bytes // len(WORDS) + 1))[:num_bytes]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": text, "max_tokens": 1}),
        (
            "/v1/completions",
            {"prompt": text[:MOST], "max_tokens": 1, "truncate_prompt_tokens": 100},
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        ),
    ]
    folder = new_folder("bodies")
    for number, (_, body) in enumerate(bodies):
        (folder / str(number)).write_text(json.dumps(body))
    here = [os.getpid(), *([] if server is None else [server])]
    health, gaps = Clock(here), Clock([*here, *([] if engine is None else [engine])])
    is_over = asyncio.Event()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        streaming = asyncio.Event()

        async def stream() -> None:
            body = {"prompt": "Go", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_raw():
                    if streaming.is_set():
                        gaps.end()
                    gaps.begin()
                    streaming.set()
                    if is_over.is_set():
                        return
            raise AssertionError("the stream ended too early")

        async def poll() -> None:
            while not is_over.is_set():
                health.begin()
                assert (await client.get("/health")).status_code == 200
                health.end()
                await asyncio.sleep(0.1)

        async def send(number: int) -> int:
            # Processes of their own: what this one did with megabytes would be measured, too.
            number %= len(bodies)
            sender = await asyncio.create_subprocess_exec(
                *("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url + bodies[number][0]),
                *(
                    "-H",
                    "Content-Type: application/json",
                    "--data-binary",
                    f"@{folder / str(number)}",
                ),
                stdout=asyncio.subprocess.PIPE,
            )
            status, _ = await sender.communicate()
            return int(status)

        tasks = [asyncio.create_task(stream()), asyncio.create_task(poll())]
        async with asyncio.timeout(30):
            await streaming.wait()
        statuses = await asyncio.gather(*(send(number) for number in range(num_prompts)))
        is_over.set()
        await asyncio.gather(*tasks)
    return health, gaps, statuses


pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None, reason="curl sends the large bodies: Python would be in the way"
)


@pytest.mark.long
def test_ten_prompts_of_5_megabytes() -> None:
    """/health within 100 ms, no gap of 100 ms in a stream."""
    with serving(model=wordy_model()) as server:
        health, gaps, statuses = asyncio.run(
            watch(
                server.url,
                10,
                5_000_000,
                num_tokens=8000,
                server=server.process.pid,
                engine=server.engine_pid(),
            )
        )
        print(f"/health {health}; stream {gaps}")
        assert set(statuses) == {200, 400}
        assert health.longest < 0.1
        assert gaps.longest < 0.1


@pytest.mark.long
def test_prompts_of_5_megabytes_at_most_double_the_gaps() -> None:
    """Of SmolLM2. What is usual: the longest gap while as many short prompts come, of about the
    tokens that the large ones are cut to."""
    with serving(model=embedded_model()) as server:

        def longest_gap(num_bytes: int) -> float:
            _, gaps, statuses = asyncio.run(
                watch(
                    server.url,
                    10,
                    num_bytes,
                    num_tokens=6000,
                    server=server.process.pid,
                    engine=server.engine_pid(),
                )
            )
            assert set(statuses) == ({200} if num_bytes < MOST else {200, 400})
            print(f"{num_bytes} bytes: {gaps}")
            return gaps.longest

        longest_gap(400)  # what a first one has to do
        usual = max(longest_gap(400) for _ in range(3))
        assert longest_gap(5_000_000) <= 2 * usual


def test_prompts_of_a_megabyte() -> None:
    """With room for a busy machine: on the loop, a megabyte would take a second or more."""
    with served_in_thread(lambda: scripted_llm(delay=0.01)) as url:
        health, gaps, statuses = asyncio.run(watch(url, 3, 1_000_000))
        assert sorted(statuses) == [200, 400, 400]
        assert health.longest < 0.7
        assert gaps.longest < 0.7
