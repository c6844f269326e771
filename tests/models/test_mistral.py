"""Mistral against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import make_config

VARIANTS = {
    "no window": {"sliding_window": None},
    "window that covers all": {"sliding_window": 128},
    "odd head": {"sliding_window": None, "head_dim": 24, "hidden_size": 40},
    "window": {"sliding_window": 9},
    "tied": {"sliding_window": None, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    check_against_transformers(tiny_model("Mistral", **VARIANTS[variant]), backend)


def test_an_absent_window_is_the_familys():
    """transformers' MistralConfig says 4096 where the file says nothing, and none where it says
    null."""
    folder = tiny_model("Mistral", sliding_window=4096, max_position_embeddings=8192)
    path = folder / "config.json"
    text = path.read_text()
    assert make_config(folder, max_model_len=8192).model.window == 4096
    try:
        path.write_text(text.replace('"sliding_window": 4096', '"sliding_windows": 1'))
        assert make_config(folder, max_model_len=8192).model.window == 4096
        assert make_config(folder, max_model_len=4096).model.window is None
        path.write_text(text.replace('"sliding_window": 4096', '"sliding_window": null'))
        assert make_config(folder, max_model_len=8192).model.window is None
    finally:
        path.write_text(text)
