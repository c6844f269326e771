"""Gemma 2's and 3's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.llama_names import LLAMA_HF
from pelton.models.qwen3_names import QWEN3_GGUF

# Norms of Gemma scale by 1 + weight.
_NORMS = {
    "model.layers.{i}.input_layernorm.weight": "layers.{i}.input_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "layers.{i}.attention_out_norm.weight",
    "model.layers.{i}.pre_feedforward_layernorm.weight": "layers.{i}.post_norm.weight",
    "model.layers.{i}.post_feedforward_layernorm.weight": "layers.{i}.mlp_out_norm.weight",
    "model.layers.{i}.self_attn.q_norm.weight": "layers.{i}.q_norm.weight",
    "model.layers.{i}.self_attn.k_norm.weight": "layers.{i}.k_norm.weight",
    "model.norm.weight": "norm.weight",
}

GEMMA_HF = NameRules(
    rules=(
        *(rule for rule in LLAMA_HF.rules if rule.source not in _NORMS),
        *(Rule(source, target, transform="add_one") for source, target in _NORMS.items()),
    ),
)

# Converters add the one. The norm before the feed-forward network has the name of Llama's.
GEMMA_GGUF = NameRules(
    rules=(
        *QWEN3_GGUF.rules,
        Rule("blk.{i}.post_attention_norm.weight", "layers.{i}.attention_out_norm.weight"),
        Rule("blk.{i}.post_ffw_norm.weight", "layers.{i}.mlp_out_norm.weight"),
    ),
)
