"""all-MiniLM-L6-v2, real weights: vectors as sentence-transformers makes them."""

from __future__ import annotations

import numpy as np
import pytest
from support.minilm import minilm, needs_minilm, sentence_vector, texts_of_lengths

from pelton.config.pooling import PoolingParams
from pelton.engine.llm import LLM
from pelton.errors import RequestError

pytestmark = needs_minilm


@pytest.fixture(scope="module")
def llm():
    made = LLM(str(minilm()))
    yield made
    made.close()


def test_vectors_are_sentence_transformers(llm):
    lengths = [*range(3, 43), 60, 100, 127, 128, 129, 200, 230, 254, 255, 256]
    texts = ["", *texts_of_lengths(lengths)]
    outputs = llm.embed(texts, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [2, *lengths]
    for text, output in zip(texts, outputs, strict=True):
        assert np.dot(output.outputs.embedding, sentence_vector(text)) >= 0.9999
    assert llm.config.max_model_len == 256
    # As the authors' example has it: a question is nearer to its answer than to another text.
    question, answer, other = llm.embed(
        ["How many people live in Berlin?", "Berlin has 3.5 million inhabitants.", "A red apple."],
        use_tqdm=False,
    )
    near = np.dot(question.outputs.embedding, answer.outputs.embedding)
    far = np.dot(question.outputs.embedding, other.outputs.embedding)
    assert near > 0.5 > 0.2 > far


def test_257_tokens_are_refused_or_cut(llm):
    (text,) = texts_of_lengths([257])
    with pytest.raises(
        RequestError, match="has 257 tokens; with max_model_len=256 it may have 256"
    ):
        llm.embed(text, use_tqdm=False)
    for asked in (-1, 256):
        (output,) = llm.embed(text, use_tqdm=False, truncate_prompt_tokens=asked)
        assert len(output.prompt_token_ids) == 256
        assert np.dot(output.outputs.embedding, sentence_vector(text)) >= 0.9999
    with pytest.raises(RequestError, match="at most max_model_len=256, got 257"):
        llm.embed(text, PoolingParams(truncate_prompt_tokens=257), use_tqdm=False)
    with pytest.raises(RequestError, match="must be above 2, the number of special tokens"):
        llm.embed(text, PoolingParams(truncate_prompt_tokens=2), use_tqdm=False)


def test_a_longer_context_may_be_asked_for():
    made = LLM(str(minilm()), max_model_len=512)
    (text,) = texts_of_lengths([257])
    (output,) = made.embed(text, use_tqdm=False)
    assert len(output.prompt_token_ids) == 257
    made.close()
