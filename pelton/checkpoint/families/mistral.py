"""MistralForCausalLM. Defaults are transformers' MistralConfig's.

An absent sliding_window means 4096 there and null means none; both are read so.
"""

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

_WINDOW = 4096


def read_mistral(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_experts(config)
    refuse_softcaps(config)
    config.require("layer_types")
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    sizes = dimensions(config)
    has_window = "sliding_window" not in config.values or config.get("sliding_window") is not None
    return ModelConfig(
        architecture="MistralForCausalLM",
        **sizes,
        hidden_act=config.text("hidden_act"),
        rope=rope(config, sizes["head_dim"], sizes["max_position"]),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=False,
        mlp_bias=False,
        layer_kinds=("window",) * sizes["num_layers"] if has_window else (),
        window=config.integer("sliding_window", _WINDOW) if has_window else None,
        checkpoint_dtype=dtype,
    )
