"""Olmo2ForCausalLM. Defaults are transformers'."""

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


def read_olmo2(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_experts(config)
    refuse_softcaps(config)
    config.require("sliding_window")
    config.require("layer_types")
    config.require("clip_qkv")
    config.require("mlp_bias", False)
    sizes = dimensions(config)
    return ModelConfig(
        architecture="Olmo2ForCausalLM",
        **sizes,
        hidden_act=config.text("hidden_act"),
        rope=rope(config, sizes["head_dim"], sizes["max_position"]),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", False),
        mlp_bias=False,
        joint_qk_norm=True,
        pre_norms=False,
        post_norms=True,
        checkpoint_dtype=dtype,
    )
