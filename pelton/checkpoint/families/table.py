"""Readers of config.json by architecture: "module:function", (reader, dtype) -> ModelConfig."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from pelton.checkpoint.config_reader import ConfigReader
from pelton.config.model import ModelConfig

ARCHITECTURES: dict[str, str] = {
    "BertModel": "pelton.checkpoint.families.encoder:read_bert",
    "Gemma2ForCausalLM": "pelton.checkpoint.families.gemma:read_gemma2",
    "Gemma3ForCausalLM": "pelton.checkpoint.families.gemma:read_gemma3",
    "GptOssForCausalLM": "pelton.checkpoint.families.gpt_oss:read_gpt_oss",
    "GraniteForCausalLM": "pelton.checkpoint.families.granite:read_granite",
    "GraniteMoeHybridForCausalLM": "pelton.checkpoint.families.granite:read_granite_hybrid",
    "LlamaForCausalLM": "pelton.checkpoint.families.llama:read_llama",
    "MinistralForCausalLM": "pelton.checkpoint.families.ministral:read_ministral",
    "MistralForCausalLM": "pelton.checkpoint.families.mistral:read_mistral",
    "ModernBertModel": "pelton.checkpoint.families.encoder:read_modernbert",
    "Olmo2ForCausalLM": "pelton.checkpoint.families.olmo:read_olmo2",
    "OlmoeForCausalLM": "pelton.checkpoint.families.olmo:read_olmoe",
    "Phi3ForCausalLM": "pelton.checkpoint.families.phi3:read_phi3",
    "Qwen2ForCausalLM": "pelton.checkpoint.families.qwen:read_qwen2",
    "Qwen3ForCausalLM": "pelton.checkpoint.families.qwen:read_qwen3",
    "Qwen3MoeForCausalLM": "pelton.checkpoint.families.qwen:read_qwen3_moe",
    "RobertaModel": "pelton.checkpoint.families.encoder:read_roberta",
    "XLMRobertaModel": "pelton.checkpoint.families.encoder:read_roberta",
}


def register(architecture: str, target: str) -> None:
    """Add a family from outside the tree; `target` is "module:function"."""
    ARCHITECTURES[architecture] = target


def reader_of(architecture: str) -> Callable[[ConfigReader, str], ModelConfig]:
    """The function that the table names."""
    module, name = ARCHITECTURES[architecture].split(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
