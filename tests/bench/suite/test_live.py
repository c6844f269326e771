"""transformers as the other side: as many tokens as asked for, the greedy ones."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from support.tiny import tiny_llama

from pelton.bench import measure
from pelton.bench.suite import live
from pelton.engine.llm import LLM


def test_it_makes_the_tokens_that_pelton_makes():
    transformers = pytest.importorskip("transformers")
    folder = str(tiny_llama())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None  # else it is not drawn before the last token
    prompts = measure.random_prompts(1000, 2, 8, 0)
    theirs = live.TransformersSide(model).generate(prompts, 6)
    ours = measure.EngineSide(LLM(folder, num_threads=1, max_model_len=64)).generate(prompts, 6)
    assert theirs.shape == (2, 6)
    assert np.array_equal(theirs, ours)


def test_without_it_nothing_alternates(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert live.open_live() == {}
