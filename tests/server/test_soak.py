"""Many requests of all kinds at once, some wrong, some given up: nothing is left of them, and what
was answered is what the engine says when it is asked alone."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.in_process import in_process, is_clean
from support.processes import chat_model
from support.serving import Served, run, served

from pelton import LLM, SamplingParams

CONCURRENCY = 64
MALFORMED: list[dict[str, Any]] = [
    {"prompt": "x", "temperature": 900},
    {"prompt": [99999]},
    {"prompt": "x" * 1000},
    {"prompt": "x", "nonsense": 1},
    {"prompt": ["x", 3]},
    {},
]


@dataclass(frozen=True, slots=True)
class Plan:
    """One request. leaves_after: chunks or 5 ms after which its client is gone; None: it stays."""

    prompt: list[int]
    sampling: dict[str, Any]
    streams: bool
    leaves_after: int | None = None
    malformed: dict[str, Any] | None = None


def plans(num: int, seed: int) -> list[Plan]:
    chance = random.Random(seed)
    found = []
    for number in range(num):
        kind = chance.random()
        sampling = {"max_tokens": chance.randint(1, 40), "temperature": chance.choice([0, 0.8])}
        if sampling["temperature"]:
            sampling["seed"] = number
        found.append(
            Plan(
                prompt=[chance.randrange(256) for _ in range(chance.randint(1, 100))],
                sampling=sampling,
                streams=chance.random() < 0.5,
                leaves_after=chance.randint(0, 30) if kind < 0.3 else None,
                malformed=chance.choice(MALFORMED) if 0.3 <= kind < 0.4 else None,
            )
        )
    return found


async def ask(server: Served, plan: Plan) -> list[int] | None:
    """Token ids of the answer; None if there is to be none."""
    if plan.malformed is not None:
        body = {**plan.malformed, "stream": plan.streams}
        assert (await server.post("/v1/completions", body)).status_code == 400
        return None
    body = {"prompt": plan.prompt, "return_token_ids": True, **plan.sampling}
    if plan.leaves_after is None:
        if not plan.streams:
            answer = await server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            ids: list[int] = answer.json()["choices"][0]["token_ids"]
            return ids
        *chunks, done = await server.events("/v1/completions", body)
        assert done == "[DONE]"
        return [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    if plan.streams:
        body["stream"] = True
        async with server.client.stream("POST", "/v1/completions", json=body) as response:
            left = plan.leaves_after
            async for _ in response.aiter_lines():
                if (left := left - 1) <= 0:
                    return None
        return None
    asking = asyncio.create_task(server.post("/v1/completions", body))
    await asyncio.sleep(plan.leaves_after * 0.005)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return None


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num", [100, pytest.param(2000, marks=pytest.mark.long)])
def test_soak(num: int) -> None:
    model = LLM(str(chat_model()), batch_invariant=True, max_num_seqs=16, num_threads=1)
    asked = plans(num, seed=num)
    sizes: list[int] = []

    async def main() -> list[list[int] | None]:
        llm = in_process(model)
        async with served(llm) as server:
            room = asyncio.Semaphore(CONCURRENCY)
            before = len(asyncio.all_tasks())

            async def one(number: int, plan: Plan) -> list[int] | None:
                async with room:
                    answer = await ask(server, plan)
                if number in (num // 2, num - 1):
                    gc.collect()
                    sizes.append(resident_bytes())
                return answer

            answers = await asyncio.gather(*(one(i, plan) for i, plan in enumerate(asked)))
            async with asyncio.timeout(10):
                while not is_clean(llm) or server.state.in_flight.now:
                    await asyncio.sleep(0.01)
            await server.client.aclose()
            await asyncio.sleep(0.1)
            assert len(asyncio.all_tasks()) <= before
            return answers

    answers = run(main, timeout=600)
    assert sizes[1] - sizes[0] < 20 * 2**20
    kept = [(plan, ids) for plan, ids in zip(asked, answers, strict=True) if ids is not None]
    assert len(kept) > num * 0.45
    for plan, ids in kept:
        params = SamplingParams(**plan.sampling)
        (alone,) = model.generate([{"prompt_token_ids": plan.prompt}], params, use_tqdm=False)
        assert list(alone.outputs[0].token_ids) == ids
