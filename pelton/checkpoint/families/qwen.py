"""Qwen2ForCausalLM (Qwen 2 and 2.5), Qwen3ForCausalLM and Qwen3MoeForCausalLM. Defaults are
transformers'."""

from __future__ import annotations

from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    experts,
    layer_kinds,
    refuse_experts,
    refuse_foreign,
    refuse_softcaps,
    rope,
)
from pelton.checkpoint.limits import MAX_INTERMEDIATE
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


def read_qwen3_moe(config: ConfigReader, dtype: str) -> ModelConfig:
    sizes = dimensions(config)
    num_layers = sizes["num_layers"]
    # The oracle knows neither: its window is every layer's.
    config.require("layer_types")
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise config.wrong("mlp_only_layers", "a list of layer indices")
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    fields = experts(config, default=128, default_chosen=8)
    if not any(sparse):
        fields = {"num_experts": 0, "experts_per_token": 0}
    return ModelConfig(
        architecture="Qwen3MoeForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype, first_window=0),
        **fields,
        moe_intermediate_size=config.integer("moe_intermediate_size", 768, high=MAX_INTERMEDIATE),
        sparse_layers=() if all(sparse) or not any(sparse) else sparse,
        norm_topk_prob=config.boolean("norm_topk_prob", False),
        attention_bias=config.boolean("attention_bias", False),
        qk_norm=True,
    )


def _shared(
    config: ConfigReader, sizes: dict[str, Any], dtype: str, *, first_window: int | None = None
) -> dict[str, Any]:
    """The fields that all have alike. first_window: the first layer that has the window, where the
    family has no max_window_layers."""
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_softcaps(config)
    config.require("mlp_bias", False)
    num_layers = sizes["num_layers"]
    first = first_window
    if first is None:
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
