"""Qwen2ForCausalLM (Qwen 2 and 2.5) and Qwen3ForCausalLM. Defaults are transformers'."""

from __future__ import annotations

from typing import Any

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


def read_qwen2(config: ConfigReader, dtype: str) -> ModelConfig:
    refuse_experts(config)
    config.require("attention_bias", True)
    sizes = dimensions(config)
    return ModelConfig(
        architecture="Qwen2ForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype),
        attention_bias=False,
        qkv_bias=True,
    )


def read_qwen3(config: ConfigReader, dtype: str) -> ModelConfig:
    refuse_experts(config)
    sizes = dimensions(config, head_dim=128)
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype),
        attention_bias=config.boolean("attention_bias", False),
        qk_norm=True,
    )


def _shared(config: ConfigReader, sizes: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The fields that both have alike."""
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_softcaps(config)
    config.require("mlp_bias", False)
    num_layers = sizes["num_layers"]
    first = config.integer("max_window_layers", 28, low=0)
    kinds: tuple[LayerKind, ...] = ()
    window = None
    if config.boolean("use_sliding_window", False) and config.get("sliding_window") is not None:
        window = config.integer("sliding_window")
        default: tuple[LayerKind, ...] = tuple(
            "window" if i >= first else "full" for i in range(num_layers)
        )
        kinds = layer_kinds(config, num_layers, default)
    elif layer_kinds(config, num_layers):
        raise config.wrong("layer_types", "all full_attention, as no sliding_window is in use")
    return {
        "hidden_act": config.text("hidden_act"),
        "rope": rope(config, sizes["head_dim"], sizes["max_position"]),
        "tie_word_embeddings": config.boolean("tie_word_embeddings", False),
        "mlp_bias": False,
        "layer_kinds": kinds,
        "window": window if kinds else None,
        "checkpoint_dtype": dtype,
    }
