"""Gemma 2 and 3 against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

import pytest
import torch
from support.families import BACKENDS, check_against_transformers, tiny_model
from support.tiny import TinyEngine, make_config

from pelton.errors import UnsupportedError

BASE = {"initializer_range": 0.2, "sliding_window": 128, "query_pre_attn_scalar": 24}
ROPES = (
    ("full_attention", (("rope_type", "linear"), ("factor", 8.0), ("rope_theta", 5000.0))),
    ("sliding_attention", (("rope_type", "default"), ("rope_theta", 100.0))),
)
LAYERS = ("sliding_attention", "full_attention")
VARIANTS = {
    "gemma2": ("Gemma2", {}),
    "gemma2 tight caps": (
        "Gemma2",
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 5.0},
    ),
    "gemma2 no caps": (
        "Gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2 tied": ("Gemma2", {"tie_word_embeddings": True, "initializer_range": 0.3}),
    "gemma2 biases": ("Gemma2", {"attention_bias": True}),
    "gemma2 window": ("Gemma2", {"sliding_window": 9}),
    "gemma3": ("Gemma3Text", {}),
    "gemma3 window": ("Gemma3Text", {"sliding_window": 9, "layer_types": LAYERS}),
    "gemma3 cap": ("Gemma3Text", {"final_logit_softcapping": 5.0}),
    "gemma3 rotations": (
        "Gemma3Text",
        {"rope_parameters": ROPES, "layer_types": ("full_attention", "sliding_attention")},
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant, backend):
    family, overrides = VARIANTS[variant]
    check_against_transformers(tiny_model(family, **{**BASE, **overrides}), backend)


def test_absent_softcaps_are_the_familys():
    folder = tiny_model("Gemma2", **BASE)
    path = folder / "config.json"
    text = path.read_text()
    assert make_config(folder).model.attention_softcap == 50.0
    try:
        path.write_text(text.replace("attn_logit_softcapping", "unknown"))
        assert make_config(folder).model.attention_softcap == 50.0
        path.write_text(
            text.replace('"attn_logit_softcapping": 50.0', '"attn_logit_softcapping": null')
        )
        assert make_config(folder).model.attention_softcap is None
    finally:
        path.write_text(text)


def test_the_ladder_shows_what_runs():
    """torch's fused attention has no softcap: such layers say that they run another kernel."""
    names = {}
    for key, cap in (("with", 50.0), ("without", None)):
        folder = tiny_model("Gemma2", **BASE, attn_logit_softcapping=cap)
        layers = TinyEngine(folder).worker.model.layers
        names[key] = {layer.mixer.attend.names for layer in layers}
    assert names == {"with": {("masked",)}, "without": {("sdpa",)}}


def test_embeddings_are_scaled_by_a_rounded_number():
    folder = tiny_model("Gemma2", **BASE)
    model = TinyEngine(folder, dtype="bfloat16").worker.model
    ids = torch.arange(5, dtype=torch.int32)
    out = torch.empty(5, 48, dtype=torch.bfloat16)
    model.embed(ids, out, None)
    scale = torch.tensor(48**0.5).bfloat16()
    assert torch.equal(out, model.embedding.weight.tensor[:5] * scale)


def test_scores_of_gemma3_have_no_softcap():
    folder = tiny_model("Gemma3Text", **BASE, attn_logit_softcapping=50.0)
    with pytest.raises(UnsupportedError, match=r"attn_logit_softcapping=50.0 is not supported"):
        make_config(folder)
