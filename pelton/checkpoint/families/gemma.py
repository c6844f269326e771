"""Gemma2ForCausalLM and Gemma3ForCausalLM (text). Defaults are transformers'."""

from __future__ import annotations

from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    layer_kinds,
    refuse_experts,
    refuse_foreign,
    rope,
    scaled_rope,
)
from pelton.config.model import ModelConfig, RopeConfig


def read_gemma2(config: ConfigReader, dtype: str) -> ModelConfig:
    sizes = dimensions(config, head_dim=256)
    return ModelConfig(
        architecture="Gemma2ForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype, pattern=2, softcaps=(50.0, 30.0)),
        rope=rope(config, sizes["head_dim"], sizes["max_position"]),
    )


def read_gemma3(config: ConfigReader, dtype: str) -> ModelConfig:
    sizes = dimensions(config, head_dim=256)
    # The oracle reads it and leaves it out of the arithmetic, so nobody knows what is meant.
    config.require("attn_logit_softcapping")
    pattern = config.integer("sliding_window_pattern", 6)
    full, local = _ropes(config, sizes["head_dim"], sizes["max_position"])
    return ModelConfig(
        architecture="Gemma3ForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype, pattern=pattern, softcaps=(None, None)),
        rope=full,
        local_rope=local,
        qk_norm=True,
    )


def _shared(
    config: ConfigReader,
    sizes: dict[str, Any],
    dtype: str,
    *,
    pattern: int,
    softcaps: tuple[float | None, float | None],
) -> dict[str, Any]:
    """The fields that both have alike. pattern: every so manieth layer sees all tokens, where
    layer_types does not say. softcaps: of scores and logits, where the file is silent."""
    config.require("hidden_activation", "gelu_pytorch_tanh")
    config.require("use_bidirectional_attention", False)
    refuse_foreign(config)
    refuse_experts(config)
    config.require("mlp_bias", False)
    num_layers = sizes["num_layers"]
    kinds = layer_kinds(
        config,
        num_layers,
        tuple("window" if (i + 1) % pattern else "full" for i in range(num_layers)),
    )
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": config.boolean("tie_word_embeddings", True),
        "attention_bias": config.boolean("attention_bias", False),
        "mlp_bias": False,
        "layer_kinds": kinds,
        "window": config.integer("sliding_window", 4096) if kinds else None,
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "attention_softcap": _softcap(config, "attn_logit_softcapping", softcaps[0]),
        "final_softcap": _softcap(config, "final_logit_softcapping", softcaps[1]),
        "post_norms": True,
        "embedding_multiplier": sizes["hidden_size"] ** 0.5,
        "checkpoint_dtype": dtype,
    }


def _softcap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """null means none; only an absent key means the default."""
    if key not in config.values:
        config.get(key)
        return default
    return None if config.get(key) is None else config.number(key)


def _ropes(config: ConfigReader, head_dim: int, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Of the full layers and of the window layers: transformers 5 has an object for each."""
    theta = config.number("rope_theta", 1e6)
    local_theta = config.number("rope_local_base_freq", 1e4)
    both = config.nested("rope_parameters")
    if both is None or not {"full_attention", "sliding_attention"} & both.values.keys():
        full = rope(config, head_dim, max_position, theta=theta)
        return full, RopeConfig(rotary_dim=head_dim, theta=local_theta)
    config.require("rope_scaling")
    ropes = []
    for key, default in (("full_attention", theta), ("sliding_attention", local_theta)):
        reader = both.nested(key) or ConfigReader({}, f"{both.where}: {key}")
        reader.require("partial_rotary_factor", 1.0, 1)
        own_theta = reader.number("rope_theta", default)
        ropes.append(scaled_rope(reader, head_dim, own_theta, max_position))
    return ropes[0], ropes[1]
