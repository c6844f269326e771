"""Llama's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from dataclasses import replace

from pelton.checkpoint.name_map import NameRules, Rule

LLAMA_HF = NameRules(
    rules=(
        Rule("model.embed_tokens.weight", "embed.weight"),
        Rule("model.layers.{i}.input_layernorm.weight", "layers.{i}.input_norm.weight"),
        Rule("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.qkv.weight", "q"),
        Rule("model.layers.{i}.self_attn.k_proj.weight", "layers.{i}.qkv.weight", "k"),
        Rule("model.layers.{i}.self_attn.v_proj.weight", "layers.{i}.qkv.weight", "v"),
        Rule("model.layers.{i}.self_attn.q_proj.bias", "layers.{i}.qkv.bias", "q"),
        Rule("model.layers.{i}.self_attn.k_proj.bias", "layers.{i}.qkv.bias", "k"),
        Rule("model.layers.{i}.self_attn.v_proj.bias", "layers.{i}.qkv.bias", "v"),
        Rule("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.o.weight"),
        Rule("model.layers.{i}.self_attn.o_proj.bias", "layers.{i}.o.bias"),
        Rule("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.post_norm.weight"),
        Rule("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.gate_up.weight", "gate"),
        Rule("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.gate_up.weight", "up"),
        Rule("model.layers.{i}.mlp.gate_proj.bias", "layers.{i}.gate_up.bias", "gate"),
        Rule("model.layers.{i}.mlp.up_proj.bias", "layers.{i}.gate_up.bias", "up"),
        Rule("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.down.weight"),
        Rule("model.layers.{i}.mlp.down_proj.bias", "layers.{i}.down.bias"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "head.weight", tied_to="model.embed_tokens.weight"),
    ),
    # Buffers that old transformers versions saved; they follow from config.json.
    ignored=("model.layers.{i}.self_attn.rotary_emb.inv_freq",),
)

LLAMA_GGUF = NameRules(
    rules=(
        Rule("token_embd.weight", "embed.weight"),
        Rule("blk.{i}.attn_norm.weight", "layers.{i}.input_norm.weight"),
        Rule("blk.{i}.attn_q.weight", "layers.{i}.qkv.weight", "q", "unpermute"),
        Rule("blk.{i}.attn_k.weight", "layers.{i}.qkv.weight", "k", "unpermute"),
        Rule("blk.{i}.attn_v.weight", "layers.{i}.qkv.weight", "v"),
        Rule("blk.{i}.attn_q.bias", "layers.{i}.qkv.bias", "q", "unpermute"),
        Rule("blk.{i}.attn_k.bias", "layers.{i}.qkv.bias", "k", "unpermute"),
        Rule("blk.{i}.attn_v.bias", "layers.{i}.qkv.bias", "v"),
        Rule("blk.{i}.attn_output.weight", "layers.{i}.o.weight"),
        Rule("blk.{i}.attn_output.bias", "layers.{i}.o.bias"),
        Rule("blk.{i}.ffn_norm.weight", "layers.{i}.post_norm.weight"),
        Rule("blk.{i}.ffn_gate.weight", "layers.{i}.gate_up.weight", "gate"),
        Rule("blk.{i}.ffn_up.weight", "layers.{i}.gate_up.weight", "up"),
        Rule("blk.{i}.ffn_gate.bias", "layers.{i}.gate_up.bias", "gate"),
        Rule("blk.{i}.ffn_up.bias", "layers.{i}.gate_up.bias", "up"),
        Rule("blk.{i}.ffn_down.weight", "layers.{i}.down.weight"),
        Rule("blk.{i}.ffn_down.bias", "layers.{i}.down.bias"),
        Rule("output_norm.weight", "norm.weight"),
        Rule("output.weight", "head.weight"),
    ),
    # Read with the metadata: checkpoint/gguf_rope.py turns it into Llama 3's rope scaling.
    ignored=("rope_freqs.weight",),
)

# llama.cpp reorders rows for "llama" and "granite" alone; all others' heads rotate as they are.
GGUF_IN_ORDER = NameRules(rules=tuple(replace(rule, transform=None) for rule in LLAMA_GGUF.rules))
