"""OLMo 2's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.qwen3_names import QWEN3_GGUF, QWEN3_HF

_LAYER, _BLOCK = "model.layers.{i}", "blk.{i}"
_ATTENTION_OUT, _MLP_OUT = "layers.{i}.attention_out_norm.weight", "layers.{i}.mlp_out_norm.weight"
# Norms that Qwen 3 has before attention and feed-forward network.
_BEFORE = ("layers.{i}.input_norm.weight", "layers.{i}.post_norm.weight")

OLMO2_HF = NameRules(
    rules=(
        *(rule for rule in QWEN3_HF.rules if rule.target not in _BEFORE),
        Rule(f"{_LAYER}.post_attention_layernorm.weight", _ATTENTION_OUT),
        Rule(f"{_LAYER}.post_feedforward_layernorm.weight", _MLP_OUT),
    ),
    ignored=QWEN3_HF.ignored,
)

OLMO2_GGUF = NameRules(
    rules=(
        *(rule for rule in QWEN3_GGUF.rules if rule.target not in _BEFORE),
        Rule(f"{_BLOCK}.post_attention_norm.weight", _ATTENTION_OUT),
        Rule(f"{_BLOCK}.post_ffw_norm.weight", _MLP_OUT),
    ),
)
