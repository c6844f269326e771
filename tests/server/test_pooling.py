"""The endpoints that pool, with tiny models in this process."""

from __future__ import annotations

import base64
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
import torch
from safetensors.torch import save
from support.embeds import in_base64, own_rows
from support.encoders import tiny_encoder
from support.in_process import in_process, is_clean
from support.pooled import cosine, hidden_states, normalised, scores, tiny_pooled, with_byte_tokens
from support.scripted_engine import scripted_llm
from support.serving import Served, run, served, served_in_thread

from pelton.engine.llm import LLM
from pelton.errors import RequestError
from pelton.server.pooling import MAX_INPUTS

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["The sea", "is wide.", "x"]


@pytest.fixture(scope="module")
def embedder() -> Iterator[LLM]:
    folder = with_byte_tokens(tiny_pooled("Qwen3"))
    llm = LLM(str(folder), num_gpu_blocks_override=64, max_num_seqs=4, enable_prompt_embeds=True)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def judge() -> Iterator[LLM]:
    """A classifier of one class."""
    folder = with_byte_tokens(tiny_pooled("Llama", "classify", num_labels=1))
    llm = LLM(str(folder), num_gpu_blocks_override=64)
    yield llm
    llm.close()


def with_server(llm: LLM, main: Callable[[Served], Awaitable[None]], **options: Any) -> None:
    async def serving() -> None:
        engine = in_process(llm)
        async with served(engine, **options) as server:
            await main(server)
            assert is_clean(engine)

    run(serving)


def vector(text: str) -> np.ndarray:
    return normalised(hidden_states(tiny_pooled("Qwen3"), list(text.encode()))[-1])


async def refused(server: Served, path: str, body: Any) -> dict[str, Any]:
    response = await server.post(path, body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_embeddings_of_all_kinds_of_inputs(embedder: LLM) -> None:
    ids = [list(text.encode()) for text in TEXTS]

    async def main(server: Served) -> None:
        for given, count in ((TEXTS, 3), (ids, 3), (TEXTS[0], 1), (ids[0], 1), ([TEXTS[0]], 1)):
            answer = await server.post(EMBEDDINGS, {"input": given})
            assert answer.status_code == 200, answer.text
            found = answer.json()
            assert found["object"] == "list"
            assert found["usage"]["prompt_tokens"] == sum(map(len, ids[:count]))
            assert [one["index"] for one in found["data"]] == list(range(count))
            for text, one in zip(TEXTS, found["data"]):
                assert one["object"] == "embedding"
                assert cosine(np.array(one["embedding"]), vector(text)) > 0.9999

    with_server(embedder, main)


def test_base64_and_dimensions(embedder: LLM) -> None:
    async def main(server: Served) -> None:
        body = {"input": TEXTS[0], "dimensions": 8}
        numbers = (await server.post(EMBEDDINGS, body)).json()["data"][0]["embedding"]
        coded = await server.post(EMBEDDINGS, {**body, "encoding_format": "base64"})
        raw = base64.b64decode(coded.json()["data"][0]["embedding"])
        np.testing.assert_allclose(np.frombuffer(raw, "<f4"), numbers, rtol=1e-6)
        assert np.linalg.norm(numbers) == pytest.approx(1, abs=1e-5)
        raw_vector = (await server.post(EMBEDDINGS, {**body, "use_activation": False})).json()
        hidden = hidden_states(tiny_pooled("Qwen3"), list(TEXTS[0].encode()))[-1][:8]
        np.testing.assert_allclose(raw_vector["data"][0]["embedding"], hidden, rtol=1e-3, atol=1e-4)

    with_server(embedder, main)


def test_the_official_client(embedder: LLM) -> None:
    with served_in_thread(lambda: in_process(embedder)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        for encoding in ("float", "base64", openai.NOT_GIVEN):
            found = client.embeddings.create(model=model, input=TEXTS, encoding_format=encoding)
            assert found.usage.total_tokens == sum(map(len, TEXTS))
            for text, one in zip(TEXTS, found.data, strict=True):
                numbers: Any = one.embedding
                if encoding == "base64":  # who asks for it gets it; else the client decodes it
                    numbers = np.frombuffer(base64.b64decode(numbers), "<f4")
                assert cosine(np.array(numbers), vector(text)) > 0.9999
        with pytest.raises(openai.BadRequestError, match="dimensions must be at most 48"):
            client.embeddings.create(model=model, input="x", dimensions=49)
        with pytest.raises(openai.BadRequestError, match="pools, and generates nothing"):
            client.completions.create(model=model, prompt="x")


def test_a_long_input_is_cut_where_that_is_asked_for(embedder: LLM) -> None:
    text = "abcdefgh" * 33  # 264 bytes; the context has 256

    async def main(server: Served) -> None:
        error = await refused(server, EMBEDDINGS, {"input": ["x", text]})
        assert error["message"].startswith("input[1]: ")
        assert "264" in error["message"]
        assert "256" in error["message"]
        assert error["param"] == "input"
        for truncate, kept in ((-1, 256), (5, 5)):
            body = {"input": text, "truncate_prompt_tokens": truncate}
            found = (await server.post(EMBEDDINGS, body)).json()
            assert found["usage"]["prompt_tokens"] == kept
            assert cosine(np.array(found["data"][0]["embedding"]), vector(text[:kept])) > 0.9999

    with_server(embedder, main)


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (EMBEDDINGS, {}, "input", "must have one of input and prompt_embeds, got none"),
        (EMBEDDINGS, {"input": ""}, "input", "input must hold at least 1 token"),
        (EMBEDDINGS, {"input": [""]}, "input", "input must hold at least 1 token"),
        (EMBEDDINGS, {"input": "", "prompt_embeds": "AA"}, "input", "got both"),
        (EMBEDDINGS, {"prompt_embeds": ["AA"] * 2049}, "prompt_embeds", "1 to 2048 prompts"),
        (
            EMBEDDINGS,
            {"input": [10**30]},
            "input",
            "got 1000000000000000000000000000000",
        ),
        (EMBEDDINGS, {"input": "x", "prompt_embeds": "AA"}, "input", "got both"),
        (EMBEDDINGS, {"input": []}, "input", "input must not be empty"),
        (
            EMBEDDINGS,
            {"input": ["x", [5]]},
            "input",
            "input must be a string, token ids, or a list",
        ),
        (EMBEDDINGS, {"input": [[5], [1000]]}, "input", "input[1]: input must hold token ids from"),
        (EMBEDDINGS, {"input": ["x"] * (MAX_INPUTS + 1)}, "input", f"input may hold {MAX_INPUTS}"),
        (
            EMBEDDINGS,
            {"input": "x", "dimensions": 0},
            "dimensions",
            "dimensions must be an integer",
        ),
        (
            EMBEDDINGS,
            {"input": "x", "encoding_format": "hex"},
            "encoding_format",
            "'base64' or 'float', got 'hex'",
        ),
        (EMBEDDINGS, {"input": "x", "inputs": 1}, "inputs", "Did you mean 'input'"),
        (EMBEDDINGS, {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1"),
        (EMBEDDINGS, {"input": "x", "priority": 1}, "priority", "scheduling_policy"),
        (EMBEDDINGS, {"prompt_embeds": "?"}, "prompt_embeds", "must be base64 of a safetensors"),
        (
            EMBEDDINGS,
            {"prompt_embeds": "gASVBQAAAAAAAABLAS4="},
            "prompt_embeds",
            "safetensors file",
        ),
        ("/pooling", {"input": "x", "task": "classify"}, "task", "is not one of this model's"),
        ("/pooling", {"input": "x", "method": "all"}, "method", "may be one of last, cls, mean"),
        ("/classify", {"input": "x"}, None, "another kind of model: task='classify' is not one of"),
        (
            "/pooling",
            {"input": "x", "task": "token_embed", "method": "step", "step_tag_id": 10**6},
            "step_tag_id",
            "from 0 to 999, got 1000000",
        ),
        ("/score", {"text_1": ""}, "text_2", "text_1 and text_2"),
        ("/score", {"text_1": "x"}, "text_2", "text_1 and text_2"),
        ("/score", {"text_1": "x", "documents": "y"}, "text_1", "and no others of these"),
        (
            "/score",
            {"text_1": ["x", "y"], "text_2": ["z"]},
            "text_1",
            "or as many as text_2; got 2",
        ),
        ("/score", {"queries": "x", "documents": []}, "documents", "must have 1 to"),
        ("/rerank", {"query": "x", "documents": []}, "documents", "at least 1 entry"),
        (
            "/rerank",
            {"query": "x", "documents": [{"txt": "y"}]},
            "documents",
            "documents[0] must be",
        ),
        ("/rerank", {"query": "x", "documents": ["y"], "top_n": 0}, "top_n", "at least 1"),
        (
            "/rerank",
            {"query": "x" * 300, "documents": ["y"]},
            "query",
            "query[0]: The prompt has 300",
        ),
        ("/v1/completions", {"prompt": "x"}, None, "This server pools, and generates nothing"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, None, "/v1/embeddings"),
    ],
)
def test_what_is_wrong_is_told_by_field(
    embedder: LLM, path: str, body: Any, param: str | None, words: str
) -> None:
    async def main(server: Served) -> None:
        error = await refused(server, path, body)
        assert words in error["message"]
        assert error["param"] == param

    with_server(embedder, main)


@pytest.mark.parametrize("path", [EMBEDDINGS, "/pooling", "/classify", "/score", "/rerank"])
def test_a_server_that_generates_says_so(path: str) -> None:
    bodies = {
        "/score": {"text_1": "a", "text_2": "b"},
        "/rerank": {"query": "a", "documents": ["b"]},
    }

    async def main() -> None:
        async with served(scripted_llm()) as server:
            error = await refused(server, path, bodies.get(path, {"input": "x"}))
            assert "start one with --runner pooling" in error["message"]
            missing = await server.post(
                path, {**bodies.get(path, {"input": "x"}), "model": "other"}
            )
            assert missing.status_code == 404

    run(main)


def test_pooling_of_tokens(embedder: LLM) -> None:
    async def main(server: Served) -> None:
        body = {"input": TEXTS, "task": "token_embed"}
        for path in ("/pooling", "/v1/pooling"):
            found = (await server.post(path, body)).json()["data"]
            for text, one in zip(TEXTS, found, strict=True):
                expected = hidden_states(tiny_pooled("Qwen3"), list(text.encode()))
                assert cosine(np.array(one["data"]), expected) > 0.9999
        coded = await server.post("/pooling", {**body, "encoding_format": "base64"})
        for one, plain in zip(coded.json()["data"], found, strict=True):
            array = np.frombuffer(base64.b64decode(one["data"]), "<f4").reshape(one["shape"])
            np.testing.assert_allclose(array, plain["data"], rtol=1e-5)
        (whole,) = (await server.post("/pooling", {"input": "x", "method": "mean"})).json()["data"]
        mean = hidden_states(tiny_pooled("Qwen3"), list(b"x")).mean(axis=0)
        assert cosine(np.array(whole["data"]), mean) > 0.9999

    with_server(embedder, main)


def test_scores_are_cosines_and_documents_are_ranked_by_them(embedder: LLM) -> None:
    query, *documents = "what is it", "it is wide", "The sea", "it is wide", "what is it"
    expected = [cosine(vector(query), vector(text)) for text in documents]

    async def main(server: Served) -> None:
        for path, names in (
            ("/score", ("text_1", "text_2")),
            ("/v1/score", ("queries", "documents")),
            ("/score", ("data_1", "data_2")),
        ):
            body = {names[0]: query, names[1]: documents}
            found = (await server.post(path, body)).json()
            assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
            # Equal texts are pooled once.
            assert found["usage"]["total_tokens"] == len(query) + len("it is wide") + len("The sea")
        pairs = {"text_1": [query, "x"], "text_2": ["x", query]}
        first, second = (await server.post("/score", pairs)).json()["data"]
        assert first["score"] == pytest.approx(second["score"])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = {"query": query, "documents": [*documents[:3], {"text": documents[3]}]}
            found = (await server.post(path, body)).json()["results"]
            order = sorted(range(4), key=lambda index: -expected[index])
            assert [one["index"] for one in found] == order
            assert found[0]["document"] == {"text": query}
            assert found[0]["relevance_score"] == pytest.approx(1, abs=1e-5)
        body |= {"top_n": 2, "return_documents": False}
        found = (await server.post("/rerank", body)).json()["results"]
        assert [one["index"] for one in found] == order[:2]
        assert "document" not in found[0]

    with_server(embedder, main)


def test_a_classifier_of_one_class_judges_pairs(judge: LLM) -> None:
    """Both texts of a pair go through the model together."""
    query, documents = "what is it", ["it is wide", "The sea", "x"]
    offline = judge.score(query, documents, use_tqdm=False)
    expected = [one.outputs.score for one in offline if one.outputs is not None]
    assert len(set(expected)) == 3

    async def main(server: Served) -> None:
        found = (await server.post("/score", {"text_1": query, "text_2": documents})).json()
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
        num_tokens = sum(len(one.prompt_token_ids) for one in offline)
        assert found["usage"]["total_tokens"] == num_tokens
        body = {"query": query, "documents": documents, "use_activation": False}
        ranked = (await server.post("/rerank", body)).json()["results"]
        order = sorted(range(3), key=lambda index: -expected[index])
        assert [one["index"] for one in ranked] == order
        score = ranked[0]["relevance_score"]  # before the sigmoid
        assert 1 / (1 + np.exp(-score)) == pytest.approx(expected[order[0]], abs=1e-5)
        error = await refused(server, "/score", {"text_1": query, "text_2": ["y", "z" * 300]})
        assert error["message"].startswith("text_2[1]: ")
        assert error["param"] == "text_2"

    with_server(judge, main)


def test_classes() -> None:
    folder = tiny_pooled("Llama", "classify", num_labels=3)
    llm = LLM(str(with_byte_tokens(folder)), num_gpu_blocks_override=64)

    async def main(server: Served) -> None:
        found = (await server.post("/classify", {"input": TEXTS})).json()["data"]
        raw = (await server.post("/classify", {"input": TEXTS, "use_activation": False})).json()
        for text, one, logits in zip(TEXTS, found, raw["data"], strict=True):
            expected = scores(folder, list(text.encode()), "classify")
            np.testing.assert_allclose(logits["probs"], expected, rtol=1e-3, atol=1e-3)
            probs = np.exp(expected - expected.max())
            np.testing.assert_allclose(one["probs"], probs / probs.sum(), rtol=1e-3, atol=1e-4)
            assert one["num_classes"] == 3
            assert one["label"] == f"LABEL_{expected.argmax()}"
        error = await refused(server, "/score", {"text_1": "a", "text_2": "b"})
        assert "this model has 3" in error["message"]
        assert error["param"] is None

    with_server(llm, main)
    llm.close()


def test_prompts_of_embeddings(embedder: LLM) -> None:
    """Made of the model's own table they are the text, whatever the tensor is called."""
    rows = [torch.tensor(own_rows(tiny_pooled("Qwen3"), list(text.encode()))) for text in TEXTS[:2]]
    coded = [base64.b64encode(save({"rows": one})).decode() for one in rows]

    async def main(server: Served) -> None:
        for given, texts in ((coded, TEXTS[:2]), (coded[0], TEXTS[:1])):
            found = (await server.post(EMBEDDINGS, {"prompt_embeds": given})).json()
            for text, one in zip(texts, found["data"], strict=True):
                assert cosine(np.array(one["embedding"]), vector(text)) > 0.9999
            assert found["usage"]["prompt_tokens"] == sum(map(len, texts))
        narrow = base64.b64encode(save({"a": torch.zeros(2, 5)})).decode()
        error = await refused(server, EMBEDDINGS, {"prompt_embeds": ["AA==", coded[0]]})
        assert error["message"].startswith("prompt_embeds[0]: prompt_embeds must be a safetensors")
        many = (await server.post(EMBEDDINGS, {"prompt_embeds": coded[1:] * 1025})).json()
        assert len(many["data"]) == 1025
        error = await refused(server, EMBEDDINGS, {"prompt_embeds": [coded[0], narrow]})
        assert error["message"].startswith("prompt_embeds[1]: prompt_embeds must have 48 columns")
        assert error["param"] == "prompt_embeds"

    with_server(embedder, main)


def test_embeddings_that_are_too_large_are_their_requests_fault() -> None:
    """Finite themselves, they overflow in the model."""
    llm = LLM(str(with_byte_tokens(tiny_encoder("Bert"))), enable_prompt_embeds=True)
    good, huge = (in_base64(torch.full((2, 48), value)) for value in (0.5, 3e38))

    async def main(server: Served) -> None:
        for path in (EMBEDDINGS, "/pooling"):
            error = await refused(server, path, {"prompt_embeds": [good, huge]})
            assert error["message"].startswith("prompt_embeds[1]: prompt_embeds have numbers")
            assert error["param"] == "prompt_embeds"
        assert (await server.post(EMBEDDINGS, {"prompt_embeds": good})).status_code == 200

    with_server(llm, main)
    rows = [{"prompt_embeds": torch.full((2, 48), value)} for value in (3e38, 0.5)]
    bad, fine = llm.embed(rows, use_tqdm=False)
    assert isinstance(bad.error, RequestError)
    assert fine.error is None
    assert np.isfinite(fine.outputs.embedding).all()
    llm.close()


def test_more_inputs_than_the_engine_has_rows(embedder: LLM) -> None:
    """And than may wait: a request's own inputs wait here for each other."""
    texts = [f"number {number}" for number in range(50)]

    async def main() -> None:
        engine = in_process(embedder, max_num_queued_reqs=2)
        async with served(engine) as server:
            found = (await server.post(EMBEDDINGS, {"input": texts})).json()
            for text, one in zip(texts, found["data"], strict=True):
                assert cosine(np.array(one["embedding"]), vector(text)) > 0.9999

    run(main)


def test_what_is_measured_and_logged(embedder: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def main(server: Served) -> None:
        headers = {"x-request-id": "mine"}
        await server.post(EMBEDDINGS, {"input": TEXTS, "user": "me"}, headers=headers)
        await server.post(EMBEDDINGS, {"input": [[5], [1000]]})
        text = (await server.client.get("/metrics")).text
        names = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        found = {name.partition("{")[0]: value for name, value in names.items()}
        assert float(found["pelton:request_prompt_tokens_count"]) >= 3
        assert float(found["pelton:e2e_request_latency_seconds_count"]) == 1
        ended = [name for name in names if "request_success_total" in name and "stop" in name]
        assert float(names[ended[0]]) >= 3

    with caplog.at_level(logging.INFO, "pelton.requests"):
        with_server(embedder, main, log_prompts=True)
    first, second = (one.message for one in caplog.records if one.name == "pelton.requests")
    assert f"(mine) POST {EMBEDDINGS}: 16 tokens" in first
    assert "3 prompts" in first
    assert "done, for 'me'" in first
    assert "prompt: 'The sea'" in first
    assert "refused" in second
