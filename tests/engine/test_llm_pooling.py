"""LLM.embed and its kin."""

from __future__ import annotations

import numpy as np
import pytest
from support.pooled import cosine, hidden_states, tiny_pooled
from support.tiny import prompts_of, tiny_llama

from pelton.config.params import SamplingParams
from pelton.config.pooling import PoolingParams
from pelton.engine.llm import LLM
from pelton.errors import RequestError, UnsupportedError


@pytest.fixture(scope="module")
def embedder():
    llm = LLM(str(tiny_pooled("Qwen3")), num_gpu_blocks_override=64)
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


def test_an_engine_does_one_thing(embedder):
    with pytest.raises(RequestError, match="runner='generate'"):
        embedder.generate({"prompt_token_ids": [5]}, SamplingParams(), use_tqdm=False)
    generator = LLM(str(tiny_llama()), num_gpu_blocks_override=64)
    with pytest.raises(RequestError, match="runner='pooling'"):
        generator.embed({"prompt_token_ids": [5]}, use_tqdm=False)
    with pytest.raises(RequestError, match="runner='pooling'"):
        generator.encode({"prompt_token_ids": [5]}, PoolingParams(), use_tqdm=False)
    generator.close()
    with pytest.raises(UnsupportedError, match="has no head for tokens"):
        LLM(str(tiny_pooled("Qwen3")), runner="generate")


def test_a_wrong_request_fails_alone(embedder):
    (good,) = prompts_of([7])
    first, wrong, last = embedder.embed(as_prompts([good, [10**6], good]), use_tqdm=False)
    assert isinstance(wrong.error, RequestError)
    assert wrong.outputs is None
    assert first.outputs == last.outputs
