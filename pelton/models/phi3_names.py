"""Phi-3's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.llama_names import GGUF_IN_ORDER

PHI3_HF = NameRules(
    rules=(
        Rule("model.embed_tokens.weight", "embed.weight"),
        Rule("model.layers.{i}.input_layernorm.weight", "layers.{i}.input_norm.weight"),
        Rule(
            "model.layers.{i}.self_attn.qkv_proj.weight", "layers.{i}.qkv.weight", ("q", "k", "v")
        ),
        Rule("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.o.weight"),
        Rule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.post_norm.weight"),
        Rule(
            "model.layers.{i}.mlp.gate_up_proj.weight", "layers.{i}.gate_up.weight", ("gate", "up")
        ),
        Rule("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.down.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight", tied_to="model.embed_tokens.weight"),
    ),
)

_FUSED_GGUF = (
    Rule("blk.{i}.attn_qkv.weight", "layers.{i}.qkv.weight", ("q", "k", "v")),
    Rule("blk.{i}.ffn_up.weight", "layers.{i}.gate_up.weight", ("gate", "up")),
)

# Queries, keys and values may stand apart, too; gate and up never do.
PHI3_GGUF = NameRules(
    rules=(
        *(
            rule
            for rule in GGUF_IN_ORDER.rules
            if rule.source not in ("blk.{i}.ffn_gate.weight", "blk.{i}.ffn_up.weight")
        ),
        *_FUSED_GGUF,
    ),
    # Read with the metadata, or of contexts that no request gets to.
    ignored=("rope_factors_short.weight", "rope_factors_long.weight"),
)
