"""Phi-3 against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import make_config

from pelton.errors import UnsupportedError

SHAPE = {"head_dim": 16, "hidden_size": 64}
HALF = (("rope_type", "default"), ("rope_theta", 500.0), ("partial_rotary_factor", 0.5))
VARIANTS = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "partial rotation": {"rope_parameters": HALF, "partial_rotary_factor": 0.5},
    "window": {"sliding_window": 6},
    "window that covers all": {"sliding_window": 200},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    check_against_transformers(tiny_model("Phi3", **SHAPE, **VARIANTS[variant]), backend)


def test_longrope_is_refused_by_name():
    rope = (
        ("rope_type", "longrope"),
        ("rope_theta", 10000.0),
        ("short_factor", (1.0,) * 8),
        ("long_factor", (2.0,) * 8),
    )
    with pytest.raises(UnsupportedError, match='rope_type="longrope" is not supported'):
        make_config(tiny_model("Phi3", **SHAPE, rope_parameters=rope))
