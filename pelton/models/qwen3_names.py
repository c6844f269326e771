"""Qwen 3's weight names, in Hugging Face checkpoints and in GGUF files. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.llama_names import GGUF_IN_ORDER, LLAMA_HF

QWEN3_HF = NameRules(
    rules=(
        *LLAMA_HF.rules,
        Rule("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.q_norm.weight"),
        Rule("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.k_norm.weight"),
    ),
)

QWEN3_GGUF = NameRules(
    rules=(
        *GGUF_IN_ORDER.rules,
        Rule("blk.{i}.attn_q_norm.weight", "layers.{i}.q_norm.weight"),
        Rule("blk.{i}.attn_k_norm.weight", "layers.{i}.k_norm.weight"),
    ),
)
