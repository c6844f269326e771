"""Pooled results of whole engines against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from support.pooled import cosine, hidden_states, normalised, tiny_pooled
from support.tiny import TinyEngine, prompts_of

from pelton.config.pooling import PoolingParams

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
