"""Qwen 3's weight names in Hugging Face checkpoints. No torch."""

from __future__ import annotations

from pelton.checkpoint.name_map import NameRules, Rule
from pelton.models.llama_names import LLAMA_HF

QWEN3_HF = NameRules(
    rules=(
        *LLAMA_HF.rules,
        Rule("model.layers.{i}.self_attn.q_norm.weight", "layers.{i}.q_norm.weight"),
        Rule("model.layers.{i}.self_attn.k_norm.weight", "layers.{i}.k_norm.weight"),
    ),
)
