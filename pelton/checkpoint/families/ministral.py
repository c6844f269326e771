"""MinistralForCausalLM. Defaults are transformers' MinistralConfig's.

As for Mistral, an absent sliding_window means 4096 and null means none.
"""

from __future__ import annotations

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    layer_kinds,
    refuse_experts,
    refuse_foreign,
    refuse_softcaps,
    rope,
)
from pelton.config.model import LayerKind, ModelConfig

_WINDOW = 4096


def read_ministral(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_experts(config)
    refuse_softcaps(config)
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    sizes = dimensions(config)
    num_layers = sizes["num_layers"]
    has_window = "sliding_window" not in config.values or config.get("sliding_window") is not None
    default: tuple[LayerKind, ...] = ("window",) * num_layers if has_window else ()
    kinds = layer_kinds(config, num_layers, default)
    if kinds and not has_window:
        raise config.wrong("layer_types", "all full_attention, as sliding_window is null")
    return ModelConfig(
        architecture="MinistralForCausalLM",
        **sizes,
        hidden_act=config.text("hidden_act"),
        rope=rope(config, sizes["head_dim"], sizes["max_position"]),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=False,
        mlp_bias=False,
        layer_kinds=kinds,
        window=config.integer("sliding_window", _WINDOW) if kinds else None,
        checkpoint_dtype=dtype,
    )
