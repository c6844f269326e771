"""LLM.embed and its kin."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.encoders import tiny_encoder
from support.in_process import in_process, is_clean
from support.pooled import cosine, hidden_states, normalised, scores, tiny_pooled
from support.tiny import prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.engine.llm import LLM
from pelton.errors import RequestError, UnsupportedError
from pelton.setup.resolve import describe


@pytest.fixture(scope="module")
def embedder():
    llm = LLM(str(tiny_pooled("Qwen3")), num_gpu_blocks_override=64)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def pairs():
    llm = LLM(str(tiny_encoder("Bert")))
    yield llm
    llm.close()


def as_prompts(lists):
    return [{"prompt_token_ids": ids} for ids in lists]


def test_embeddings_in_the_prompts_order(embedder):
    prompts = prompts_of([30, 1, 7])
    outputs = embedder.embed(as_prompts(prompts), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.finished
        assert output.prompt_token_ids == prompt
        expected = hidden_states(tiny_pooled("Qwen3"), prompt)[-1]
        assert cosine(np.array(output.outputs.embedding), expected) > 0.9999


def test_a_prompt_may_be_as_long_as_the_context(embedder):
    longest, longer = prompts_of([256, 257])
    (output,) = embedder.embed({"prompt_token_ids": longest}, use_tqdm=False)
    assert len(output.outputs.embedding) == 48
    with pytest.raises(
        RequestError, match="has 257 tokens; with max_model_len=256 it may have 256"
    ):
        embedder.embed({"prompt_token_ids": longer}, use_tqdm=False)
    (cut,) = embedder.embed(
        {"prompt_token_ids": [*longest, 5]}, use_tqdm=False, truncate_prompt_tokens=-1
    )
    np.testing.assert_array_equal(cut.outputs.embedding, output.outputs.embedding)


@pytest.mark.parametrize(
    ("first", "second", "field"), [([], [], "data_1"), ([], ["x"], "data_1"), ("x", [], "data_2")]
)
def test_scores_of_nothing_are_refused(embedder, first, second, field):
    with pytest.raises(RequestError, match=f"^{field} must have at least 1 prompt, got none"):
        embedder.score(first, second, use_tqdm=False)


@pytest.mark.parametrize(
    ("ids", "types", "field"),
    [
        (5, [0], "prompt_token_ids"),
        (None, [0], "prompt_token_ids"),
        ([5, 6], [0, "x"], "token_type_ids"),
        ([5, 6], [0, [1]], "token_type_ids"),
        ([5, 6], [1, 0], "token_type_ids"),
        ([5, 6], 5, "token_type_ids"),
    ],
)
def test_pairs_of_ids_that_are_none(pairs, ids, types, field):
    with pytest.raises(RequestError) as caught:
        pairs.embed({"prompt_token_ids": ids, "token_type_ids": types}, use_tqdm=False)
    assert caught.value.field == field


def test_an_engine_does_one_thing(embedder):
    with pytest.raises(RequestError, match="runner='generate'"):
        embedder.generate([{"prompt_token_ids": [5]}] * 2, SamplingParams(), use_tqdm=False)
    generator = LLM(str(tiny_llama()), num_gpu_blocks_override=64)
    with pytest.raises(RequestError, match="runner='pooling'"):
        generator.embed({"prompt_token_ids": [5]}, use_tqdm=False)
    with pytest.raises(RequestError, match="runner='pooling'"):
        generator.encode({"prompt_token_ids": [5]}, PoolingParams(), use_tqdm=False)
    generator.close()
    with pytest.raises(UnsupportedError, match="has no head for tokens"):
        LLM(str(tiny_pooled("Qwen3")), runner="generate")
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError, match="speculative_config is for tokens"):
        LLM(str(tiny_pooled("Qwen3")), speculative_config=speculation)


def test_what_the_table_says(embedder):
    table = describe(embedder.config)
    assert "pools     embed, token_embed; by default last" in table
    assert "recorded  nothing" in table


def test_a_wrong_request_fails_alone(embedder):
    (good,) = prompts_of([7])
    first, wrong, last = embedder.embed(as_prompts([good, [10**6], good]), use_tqdm=False)
    assert isinstance(wrong.error, RequestError)
    assert wrong.outputs is None
    assert first.outputs == last.outputs


@pytest.mark.parametrize(("num_labels", "kind"), [(3, None), (1, None), (3, "multi"), (1, "value")])
def test_classes(num_labels, kind):
    problems = {"multi": "multi_label_classification", "value": "regression"}
    changes = {"num_labels": num_labels, **({"problem_type": problems[kind]} if kind else {})}
    folder = tiny_pooled("Llama", "classify", **changes)
    llm = LLM(str(folder), num_gpu_blocks_override=64)
    prompts = prompts_of([12, 3])
    for prompt, output in zip(prompts, llm.classify(as_prompts(prompts), use_tqdm=False)):
        logits = scores(folder, prompt, "classify").astype(np.float64)
        expected = {
            (3, None): np.exp(logits) / np.exp(logits).sum(),
            (1, "value"): logits,
        }.get((num_labels, kind), 1 / (1 + np.exp(-logits)))
        assert output.outputs.num_classes == num_labels
        np.testing.assert_allclose(output.outputs.probs, expected, rtol=1e-4, atol=1e-6)
    (raw,) = llm.classify(
        as_prompts(prompts[:1]), PoolingParams(use_activation=False), use_tqdm=False
    )
    expected = scores(folder, prompts[0], "classify")
    np.testing.assert_allclose(raw.outputs.probs, expected, rtol=1e-4, atol=1e-5)
    if num_labels > 1:
        with pytest.raises(RequestError, match="this model has 3"):
            llm.score("a", "b")
    llm.close()


def test_scores_are_cosines(embedder):
    query, *documents = prompts_of([9, 4, 9, 20])
    folder = tiny_pooled("Qwen3")
    vectors = [hidden_states(folder, ids)[-1] for ids in (query, *documents)]
    outputs = embedder.score(as_prompts([query]), as_prompts(documents), use_tqdm=False)
    for vector, output in zip(vectors[1:], outputs, strict=True):
        assert output.outputs.score == pytest.approx(cosine(vector, vectors[0]), abs=1e-5)
    pairs = embedder.score(
        as_prompts([query, documents[0]]), as_prompts(documents[1:]), use_tqdm=False
    )
    assert pairs[0].outputs.score == pytest.approx(cosine(vectors[0], vectors[2]), abs=1e-5)
    assert pairs[1].outputs.score == pytest.approx(cosine(vectors[1], vectors[3]), abs=1e-5)
    with pytest.raises(RequestError, match="data_1 must have one prompt, or as many as data_2"):
        embedder.score(as_prompts(documents[:2]), as_prompts(documents), use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "field", "text"),
    [
        ({"task": "classify"}, "task", "not one of this model's: embed, token_embed"),
        ({"task": "nothing"}, "task", "is not known"),
        ({"method": "lost"}, "method", "Did you mean 'last'"),
        ({"method": "all"}, "method", "may be one of last, cls, mean"),
        ({"task": "token_embed", "method": "mean"}, "method", "may be one of all, step"),
        ({"dimensions": 49}, "dimensions", "at most 48"),
        ({"dimensions": 0}, "dimensions", "from 1"),
        ({"step_tag_id": 3}, "step_tag_id", "method='step' alone"),
        ({"task": "token_embed", "method": "step"}, "step_tag_id", "needs step_tag_id"),
        ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "at most max_model_len=256"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"use_activation": 1}, "use_activation", "True or False"),
    ],
)
def test_what_cannot_be_asked(embedder, params, field, text):
    with pytest.raises(RequestError, match=text) as caught:
        embedder.encode({"prompt_token_ids": [5, 6]}, PoolingParams(**params), use_tqdm=False)
    assert caught.value.field == field


def test_each_prompt_has_parameters_of_its_own(embedder):
    prompts = prompts_of([9, 4, 20])
    asked = [PoolingParams(dimensions=3), PoolingParams(task="token_embed"), PoolingParams()]
    outputs = embedder.encode(as_prompts(prompts), asked, task="embed", use_tqdm=False)
    assert [output.outputs.data.shape for output in outputs] == [(3,), (4, 48), (48,)]
    with pytest.raises(RequestError, match="one per prompt"):
        embedder.encode(as_prompts(prompts), asked[:2], use_tqdm=False)


def test_ids_that_are_no_list_are_refused_by_field(embedder):
    with pytest.raises(RequestError) as caught:
        embedder.embed({"prompt_token_ids": 5}, use_tqdm=False, truncate_prompt_tokens=3)
    assert caught.value.field == "prompt_token_ids"


def test_dimensions_cut_before_the_length_becomes_one(embedder):
    (ids,) = prompts_of([9])
    whole = hidden_states(tiny_pooled("Qwen3"), ids)[-1]
    (output,) = embedder.embed(
        {"prompt_token_ids": ids}, PoolingParams(dimensions=5), use_tqdm=False
    )
    np.testing.assert_allclose(output.outputs.embedding, normalised(whole[:5]), rtol=1e-4)


def test_served(embedder):
    """Through messages, as AsyncLLM has it."""
    prompts = prompts_of([9, 4, 20])
    expected = embedder.encode(as_prompts(prompts), use_tqdm=False)
    tokens = PoolingParams(task="token_embed")
    by_token = embedder.encode(as_prompts(prompts), tokens, use_tqdm=False)

    async def main():
        llm = in_process(embedder)
        with pytest.raises(RequestError, match="runner='generate'"):
            async for _ in llm.generate([5], SamplingParams(), request_id="g"):
                pass
        with pytest.raises(RequestError, match="dimensions must be at most 48"):
            await llm.pool([5], PoolingParams(dimensions=49), request_id="d")
        with pytest.raises(RequestError, match="from 0 to 999"):
            await llm.pool([1000], PoolingParams(), request_id="v")
        calls = [
            *(llm.pool(ids, PoolingParams(), request_id=f"a{i}") for i, ids in enumerate(prompts)),
            *(llm.pool(ids, tokens, request_id=f"b{i}") for i, ids in enumerate(prompts)),
        ]
        outputs = await asyncio.gather(*calls)
        for output, offline in zip(outputs, [*expected, *by_token], strict=True):
            np.testing.assert_allclose(
                output.outputs.data, offline.outputs.data, rtol=1e-5, atol=1e-6
            )
            assert output.prompt_token_ids == offline.prompt_token_ids
        assert is_clean(llm)

    asyncio.run(asyncio.wait_for(main(), 20))
