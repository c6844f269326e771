"""GraniteForCausalLM and GraniteMoeHybridForCausalLM (Granite 4). Defaults are transformers'."""

from __future__ import annotations

import math
from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    refuse_experts,
    refuse_foreign,
    refuse_softcaps,
    rope,
)
from pelton.config.model import LayerKind, Mamba2Config, ModelConfig, RopeConfig
from pelton.errors import UnsupportedError

_KINDS: dict[object, LayerKind] = {
    "attention": "full",
    "full_attention": "full",
    "mamba": "recurrent",
    "linear_attention": "recurrent",
}


def read_granite(config: ConfigReader, dtype: str) -> ModelConfig:
    refuse_experts(config)
    config.require("layer_types")
    sizes = dimensions(config)
    return ModelConfig(
        architecture="GraniteForCausalLM",
        **sizes,
        **_shared(config, dtype),
        rope=rope(config, sizes["head_dim"], sizes["max_position"]),
        mlp_bias=config.boolean("mlp_bias", False),
    )


def read_granite_hybrid(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("normalization_function", "rmsnorm")
    config.require("mlp_bias", False)
    sizes = dimensions(config)
    shared_size = config.integer("shared_intermediate_size", 1024)
    expert_size, sizes["intermediate_size"] = sizes["intermediate_size"], shared_size
    kinds = _layer_kinds(config, sizes["num_layers"])
    config.require("position_embedding_type", "rope", "nope")
    has_rope = config.get("position_embedding_type") == "rope"
    return ModelConfig(
        architecture="GraniteMoeHybridForCausalLM",
        **sizes,
        **_shared(config, dtype),
        rope=rope(config, sizes["head_dim"], sizes["max_position"])
        if has_rope
        else RopeConfig(rotary_dim=0, theta=1.0),
        mlp_bias=False,
        layer_kinds=kinds,
        mamba2=_mamba2(config, sizes["hidden_size"]) if kinds else None,
        **_experts(config, expert_size, shared_size),
    )


def _shared(config: ConfigReader, dtype: str) -> dict[str, Any]:
    """The fields that both have alike."""
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_softcaps(config)
    config.require("sliding_window")
    return {
        "hidden_act": config.text("hidden_act", "silu"),
        "tie_word_embeddings": config.boolean("tie_word_embeddings", False),
        "attention_bias": config.boolean("attention_bias", False),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "embedding_multiplier": config.number("embedding_multiplier", 1.0),
        "residual_multiplier": config.number("residual_multiplier", 1.0),
        "logits_divisor": config.number("logits_scaling", 1.0),
        "checkpoint_dtype": dtype,
    }


def _experts(config: ConfigReader, expert_size: int, shared_size: int) -> dict[str, Any]:
    """Fields of sparse layers, as all of them are, or as none is."""
    num_experts = config.integer("num_local_experts", 8, low=0)
    if num_experts == 0:
        return {}
    per_token = config.integer("num_experts_per_tok", 2)
    if per_token > num_experts:
        raise config.wrong("num_experts_per_tok", f"at most num_local_experts={num_experts}")
    return {
        "num_experts": num_experts,
        "experts_per_token": per_token,
        "moe_intermediate_size": expert_size,
        "shared_intermediate_size": shared_size,
        # Weights are the softmax over the logits of the chosen.
        "norm_topk_prob": True,
    }


def _layer_kinds(config: ConfigReader, num_layers: int) -> tuple[LayerKind, ...]:
    """() when all are "full"."""
    key = "layer_types" if config.get("layer_types") is not None else "layers_block_type"
    values = config.get(key)
    # Absent means that all layers are recurrent.
    if not isinstance(values, list) or len(values) != num_layers:
        raise config.wrong(key, f"a list of num_hidden_layers={num_layers} names")
    for value in values:
        if not isinstance(value, str) or value not in _KINDS:
            raise UnsupportedError(
                f"{config.where}: {key} has {value!r}, which is not supported; it may have "
                f"{', '.join(map(repr, _KINDS))}."
            )
    kinds = tuple(_KINDS[value] for value in values)
    if "full" not in kinds:
        raise UnsupportedError(
            f"{config.where}: {key} names no attention layer; a model of recurrent layers alone is "
            "not supported."
        )
    return kinds if "recurrent" in kinds else ()


def _mamba2(config: ConfigReader, hidden_size: int) -> Mamba2Config:
    num_heads = config.integer("mamba_n_heads", 128)
    num_groups = config.integer("mamba_n_groups", 1)
    inner = config.integer("mamba_expand", 2) * hidden_size
    head_dim = inner // num_heads
    if config.get("mamba_d_head") != "auto":
        head_dim = config.integer("mamba_d_head", head_dim)
    if head_dim * num_heads != inner:
        raise config.wrong(
            "mamba_n_heads",
            f"such that heads of {head_dim} make mamba_expand * hidden_size={inner}",
        )
    if num_heads % num_groups:
        raise config.wrong("mamba_n_groups", f"a divisor of mamba_n_heads={num_heads}")
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=config.integer("mamba_d_state", 256),
        conv_width=config.integer("mamba_d_conv", 4, low=2),
        conv_bias=config.boolean("mamba_conv_bias", True),
        proj_bias=config.boolean("mamba_proj_bias", False),
        dt_limits=_dt_limits(config),
    )


def _dt_limits(config: ConfigReader) -> tuple[float, float]:
    value = config.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    # JSON has no infinity: transformers 5 writes an object for it.
    limits = [
        math.inf if one == {"__float__": "Infinity"} else one
        for one in (value if isinstance(value, list) else ())
    ]
    if (
        len(limits) != 2
        or not all(type(one) in (int, float) for one in limits)
        or not 0 <= limits[0] <= limits[1]
    ):
        raise config.wrong("time_step_limit", "two numbers, 0 <= least <= greatest")
    return float(limits[0]), float(limits[1])
