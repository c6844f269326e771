"""Ministral against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
from support.families import BACKENDS, check_against_transformers, tiny_model

LAYERS = ("full_attention", "sliding_attention")
VARIANTS = {
    "no window": {"sliding_window": 9, "layer_types": ("full_attention",) * 2},
    "window everywhere": {"sliding_window": 9},
    "mixed layers": {"sliding_window": 9, "layer_types": LAYERS},
    "odd head": {"sliding_window": 9, "head_dim": 24, "hidden_size": 40},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    check_against_transformers(tiny_model("Ministral", **VARIANTS[variant]), backend)
