"""Embeddings in place of prompts, as completions take them, and what batch files ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.embeds import in_base64, own_rows
from support.in_process import in_process
from support.pooled import tiny_pooled, with_byte_tokens
from support.processes import chat_model
from support.serving import run, served

from pelton.config.server import ServerArgs
from pelton.engine.llm import LLM
from pelton.server.app import OPERATIONS
from pelton.server.local import PATHS, LocalApi
from pelton.server.openapi import openapi_document
from pelton.server.serve import make_state

COMPLETIONS = "/v1/completions"
TEXTS = ["The sea is", "x"]


def coded(text: str) -> str:
    """What the model's own table has for a text."""
    return in_base64(torch.tensor(own_rows(chat_model(), text.encode())))


@pytest.fixture(scope="module")
def generator() -> Iterator[LLM]:
    llm = LLM(str(chat_model()), num_gpu_blocks_override=64, enable_prompt_embeds=True)
    yield llm
    llm.close()


def test_embeddings_of_a_text_are_continued_as_the_text(generator: LLM) -> None:
    async def main() -> None:
        async with served(in_process(generator)) as server:
            common = {
                "temperature": 0,
                "max_tokens": 6,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            ids = [list(text.encode()) for text in TEXTS]
            expected = (await server.post(COMPLETIONS, {"prompt": ids, **common})).json()
            many = {"prompt_embeds": [coded(text) for text in TEXTS], **common}
            answer = await server.post(COMPLETIONS, {**many, "prompt": None, "echo": False})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert found["usage"] == expected["usage"]
            for one, other in zip(found["choices"], expected["choices"], strict=True):
                assert one["token_ids"] == other["token_ids"]
                assert one["prompt_token_ids"] == [-1] * len(other["prompt_token_ids"])
            events = await server.events(COMPLETIONS, {"prompt_embeds": coded(TEXTS[0]), **common})
            text = "".join(one["choices"][0]["text"] for one in events[:-1])
            assert text == expected["choices"][0]["text"]

    run(main)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt": "x", "prompt_embeds": "AA=="}, "prompt", "exclude each other"),
        ({"prompt": "", "prompt_embeds": "AA=="}, "prompt", "exclude each other"),
        ({"prompt": [], "prompt_embeds": "AA=="}, "prompt", "exclude each other"),
        (
            {"prompt_embeds": "AA==", "add_special_tokens": False},
            "add_special_tokens",
            "for prompts of text",
        ),
        ({"prompt_embeds": ["good", "AA=="]}, "prompt_embeds", "prompt_embeds[1]: prompt_embeds"),
        ({"prompt_embeds": ["good", "narrow"]}, "prompt_embeds", "prompt_embeds[1]: prompt_embeds"),
        ({"prompt_embeds": "long", "max_tokens": 2}, "prompt_embeds", "shorter than"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds", "safetensors"),
        ({"prompt_embeds": "A"}, "prompt_embeds", "base64"),
        ({"prompt_embeds": []}, "prompt_embeds", "1 to 1024 prompts"),
        ({"prompt_embeds": "AA==", "echo": True}, "echo", "for prompts of text"),
        ({"prompt_embeds": "AA==", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "text"),
        ({"prompt_embeds": "good", "max_tokens": 300}, "max_tokens", "together 310"),
        ({"prompt_embeds": "good", "prompt_logprobs": 1}, "prompt_logprobs", "need a prompt of"),
    ],
)
def test_what_is_wrong_is_told(
    generator: LLM, body: dict[str, Any], param: str, words: str
) -> None:
    async def main() -> None:
        size = own_rows(chat_model(), [5]).shape[1]
        coded_as = {
            "good": coded(TEXTS[0]),
            "narrow": in_base64(torch.ones(2, 5)),
            "long": in_base64(torch.zeros(generator.config.max_model_len, size)),
        }
        many = body.get("prompt_embeds")
        given = body
        if many:
            names = [many] if isinstance(many, str) else many
            embeds = [coded_as.get(name, name) for name in names]
            given = {**body, "prompt_embeds": embeds[0] if many == names[0] else embeds}
        async with served(in_process(generator)) as server:
            answer = await server.post(COMPLETIONS, given)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == param
            assert words in error["message"]

    run(main)


def test_without_the_flag_they_are_not_read() -> None:
    llm = LLM(str(chat_model()), num_gpu_blocks_override=64)

    async def main() -> None:
        async with served(in_process(llm)) as server:
            answer = await server.post(COMPLETIONS, {"prompt_embeds": coded("x")})
            assert answer.status_code == 400
            assert "--enable-prompt-embeds" in answer.json()["error"]["message"]

    run(main)
    llm.close()


def test_batch_files_may_ask_for_what_pools() -> None:
    llm = LLM(str(with_byte_tokens(tiny_pooled("Qwen3"))), num_gpu_blocks_override=64)
    asked: list[tuple[str, dict[str, Any], int, str]] = [
        ("/v1/embeddings", {"input": "x"}, 200, "data"),
        ("/pooling", {"input": "x"}, 200, "data"),
        ("/score", {"text_1": "x", "text_2": "y"}, 200, "data"),
        ("/rerank", {"query": "x", "documents": ["y"]}, 200, "results"),
        ("/v2/rerank", {"query": "x", "documents": ["y"]}, 200, "results"),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, 200, "data"),
        ("/v1/pooling", {"input": "x"}, 200, "data"),
        ("/classify", {"input": "x"}, 400, "error"),
        ("/v1/completions", {"prompt": "x"}, 400, "error"),
    ]

    async def main() -> None:
        engine = in_process(llm)
        api = LocalApi(make_state(engine, ServerArgs()))
        for path, body, status, key in asked:
            found, answer = await api.answer(path, json.dumps(body).encode())
            assert (found, key in json.loads(answer)) == (status, True), path
        api.state.pool.shutdown()

    run(main)
    llm.close()


def test_batch_files_take_the_paths_of_the_document() -> None:
    document = openapi_document(OPERATIONS)
    work = {
        path
        for operation in OPERATIONS
        if operation.is_work
        for path in (operation.path, *operation.aliases)
    }
    assert work == set(PATHS)
    assert work < set(document["paths"])
    ids = [entry["operationId"] for path in document["paths"].values() for entry in path.values()]
    assert len(set(ids)) == len(ids)
