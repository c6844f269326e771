"""GptOssForCausalLM. Defaults are transformers' GptOssConfig's.

The published files store the experts in MXFP4, and their quantization_config says so.
"""

from __future__ import annotations

from typing import Any

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    dimensions,
    experts,
    layer_kinds,
    refuse_foreign,
    refuse_softcaps,
    rope,
)
from pelton.config.model import LayerKind, ModelConfig

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_act", "silu")
    refuse_foreign(config, quant_method="mxfp4")
    refuse_softcaps(config)
    config.require("mlp_bias", True)
    sizes = dimensions(config, head_dim=64)
    num_layers = sizes["num_layers"]
    default: tuple[LayerKind, ...] = tuple("full" if i % 2 else "window" for i in range(num_layers))
    kinds = layer_kinds(config, num_layers, default)
    has_window = "sliding_window" not in config.values or config.get("sliding_window") is not None
    if kinds and not has_window:
        raise config.wrong("layer_types", "all full_attention, as sliding_window is null")
    fields = experts(config, default=128, default_chosen=4)
    if not fields["num_experts"]:
        raise config.wrong("num_local_experts", "above 0")
    return ModelConfig(
        architecture="GptOssForCausalLM",
        **sizes,
        **fields,
        moe_intermediate_size=sizes["intermediate_size"],
        norm_topk_prob=True,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=config.number("swiglu_limit", 7.0),
        swiglu_alpha=config.number("swiglu_alpha", 1.702),
        hidden_act=config.text("hidden_act", "silu"),
        rope=rope(config, sizes["head_dim"], sizes["max_position"], theta=150000.0, default=_ROPE),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=config.boolean("attention_bias", True),
        attention_sinks=True,
        mlp_bias=False,
        layer_kinds=kinds,
        window=config.integer("sliding_window", 128) if kinds else None,
        checkpoint_dtype=dtype,
    )
