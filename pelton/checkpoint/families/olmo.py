"""Olmo2ForCausalLM and OlmoeForCausalLM. Defaults are transformers'."""

from __future__ import annotations

from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    experts,
    refuse_experts,
    refuse_foreign,
    refuse_softcaps,
    rope,
)
from pelton.config.model import ModelConfig


def read_olmo2(config: ConfigReader, dtype: str) -> ModelConfig:
    refuse_experts(config)
    sizes = dimensions(config)
    return ModelConfig(
        architecture="Olmo2ForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype),
        pre_norms=False,
        post_norms=True,
    )


def read_olmoe(config: ConfigReader, dtype: str) -> ModelConfig:
    """intermediate_size is an expert's."""
    sizes = dimensions(config)
    fields = experts(config, default=64, default_chosen=8)
    if not fields["num_experts"]:
        raise config.wrong("num_experts", "1 or more")
    return ModelConfig(
        architecture="OlmoeForCausalLM",
        **sizes,
        **_shared(config, sizes, dtype),
        **fields,
        moe_intermediate_size=sizes["intermediate_size"],
        norm_topk_prob=config.boolean("norm_topk_prob", False),
    )


def _shared(config: ConfigReader, sizes: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The fields that both have alike."""
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_softcaps(config)
    config.require("sliding_window")
    config.require("layer_types")
    config.require("clip_qkv")
    config.require("mlp_bias", False)
    return {
        "hidden_act": config.text("hidden_act"),
        "rope": rope(config, sizes["head_dim"], sizes["max_position"]),
        "tie_word_embeddings": config.boolean("tie_word_embeddings", False),
        "attention_bias": config.boolean("attention_bias", False),
        "mlp_bias": False,
        "joint_qk_norm": True,
        "checkpoint_dtype": dtype,
    }
