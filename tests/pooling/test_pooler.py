"""Pooled results of whole engines against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.pooled import cosine, hidden_states, normalised, tiny_pooled
from support.tiny import TinyEngine, prompts_of

from pelton.config.pooling import PoolingParams
from pelton.errors import RequestFailed

LENGTHS = (1, 7, 30, 45)
CHUNKS = {"1": 1, "3": 3, "10": 10, "whole": 0}


@pytest.mark.parametrize("device", ["cpu", "queued", "fake"])
@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_the_last_token_is_transformers(chunk, device):
    folder = tiny_pooled("Qwen3")
    prompts = prompts_of(LENGTHS, seed=3)
    engine = TinyEngine(
        folder, device=device, runner="auto", long_prefill_token_threshold=chunk, num_blocks=40
    )
    for prompt, vector in zip(prompts, engine.pool(prompts, PoolingParams())):
        expected = normalised(hidden_states(folder, prompt)[-1])
        assert cosine(vector, expected) > 0.9999
        np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-5)


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_a_result_that_is_not_finite_ends_its_request_alone(task):
    """A token whose embedding is broken is in one of the prompts."""
    engine = TinyEngine(tiny_pooled("Qwen3"), runner="auto")
    with torch.inference_mode():
        engine.worker.model.embedding.weight.tensor[7].fill_(torch.nan)
    good, other = [3, 4, 5, 6], [5, 6, 7, 8]
    names = [engine.add(ids, PoolingParams(task=task)) for ids in (good, other, good)]
    outcomes = engine.run()
    assert [outcomes[name].finish_reason for name in names] == ["stop", "error", "stop"]
    assert isinstance(outcomes[names[1]].error, RequestFailed)
    assert "hidden states are not finite" in str(outcomes[names[1]].error)
    assert np.isfinite(outcomes[names[0]].pooled).all()
