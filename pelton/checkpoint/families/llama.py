"""LlamaForCausalLM: Llama 1 to 3, SmolLM2. Defaults are transformers' LlamaConfig's."""

from __future__ import annotations

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    refuse_experts,
    refuse_foreign,
    refuse_softcaps,
    rope,
)
from pelton.config.model import ModelConfig


def read_llama(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_experts(config)
    refuse_softcaps(config)
    config.require("sliding_window")
    config.require("use_sliding_window", False)
    config.require("layer_types")
    sizes = dimensions(config)
    return ModelConfig(
        architecture="LlamaForCausalLM",
        **sizes,
        hidden_act=config.text("hidden_act"),
        rope=rope(config, sizes["head_dim"], sizes["max_position"]),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        checkpoint_dtype=dtype,
    )
