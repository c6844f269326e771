"""Decoders whose tokens see those behind them, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoders import both_ways, pooled
from support.pooled import hidden_states, tiny_pooled
from support.tiny import TinyEngine, checkpoint_of, prompts_of

from pelton.checkpoint.hf_config import read_model_config
from pelton.config.pooling import PoolingParams
from pelton.errors import UnsupportedError

TOKENS = PoolingParams(task="token_embed", use_activation=False)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_hidden_states(family):
    """With fewer key heads than query heads, and norms of heads."""
    folder = both_ways(family)
    prompts = prompts_of([1, 30, 7, 50])
    engine = TinyEngine(folder, runner="auto")
    assert engine.config.pooling.method == "mean"
    assert not engine.config.model.keeps_kv
    for prompt, found in zip(prompts, pooled(engine, prompts, TOKENS), strict=True):
        expected = hidden_states(folder, prompt)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)
        if len(prompt) > 1:
            causal = hidden_states(tiny_pooled(family), prompt)
            assert np.abs(causal - expected).max() > 0.1, "directions make no difference here"


def test_the_name_says_it_too():
    checkpoint = checkpoint_of(tiny_pooled("Llama"))
    model = read_model_config(
        checkpoint, {"architectures": ["LlamaBidirectionalModel"], "pooling": "last"}
    )
    assert model.is_bidirectional
    assert model.pooling_method == "last"
    assert not read_model_config(checkpoint).is_bidirectional


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("Mistral", {"is_causal": False, "sliding_window": 9}, "a sliding window"),
        ("GptOss", {"is_causal": False}, "a sliding window"),
        ("Llama", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Llama", {"is_causal": False, "pooling": "max"}, "pooling"),
    ],
)
def test_what_is_refused(family, overrides, reason):
    from support.families import tiny_model

    with pytest.raises(UnsupportedError, match=reason):
        read_model_config(checkpoint_of(tiny_model(family)), overrides)


def test_such_a_model_does_not_generate():
    with pytest.raises(UnsupportedError, match="see those behind them"):
        TinyEngine(both_ways("Llama"))
