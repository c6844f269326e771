"""`pelton bench embed`: what it tells, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.minilm import minilm, needs_minilm
from support.tiny import tiny_llama

from pelton.bench import embed
from pelton.bench.options import EmbedOptions
from pelton.config.engine import EngineArgs
from pelton.errors import ConfigError
from pelton.tokens.tokenizer import load_tokenizer

pytestmark = needs_minilm


def test_texts_are_of_mixed_length_and_the_same_each_time():
    tokenizer = load_tokenizer(minilm())
    texts = embed.mixed_texts(tokenizer, 200, 50, seed=1)
    assert texts == embed.mixed_texts(tokenizer, 200, 50, seed=1)
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) == 1
    assert 40 < max(lengths) <= 50
    assert np.median(lengths) < 15


def test_beside_another_side(tmp_path, capsys, monkeypatch):
    def ones(args, dtype):
        return lambda texts: np.ones((len(texts), 384), np.float32)

    monkeypatch.setattr(embed, "_sentence_transformers", ones)
    path = tmp_path / "result.json"
    options = EmbedOptions(num_prompts=4, input_len=5, baseline=True, json=str(path))
    embed.run(EngineArgs(model=str(minilm())), options)
    result = json.loads(path.read_text())
    assert len(result["engine"]["samples_s"]) == len(result["ratio"]["pairs"]) == 5
    assert -1 < result["least_cosine"] < 0.5
    assert "engine / sentence-transformers: median" in capsys.readouterr().out


def test_what_is_refused():
    with pytest.raises(ConfigError, match="num_iters must be at least 5, got 4"):
        EmbedOptions(baseline=True, num_iters=4)
    with pytest.raises(ConfigError, match="input_len must be at most max_model_len=256"):
        embed.run(EngineArgs(model=str(minilm())), EmbedOptions(input_len=300))
    with pytest.raises(ConfigError, match="needs an engine that pools"):
        embed.run(EngineArgs(model=str(tiny_llama()), num_gpu_blocks_override=64), EmbedOptions())
