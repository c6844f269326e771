"""Phi-3's weight names in Hugging Face checkpoints. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule

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
