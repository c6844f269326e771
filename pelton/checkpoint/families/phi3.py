"""Phi3ForCausalLM: Phi-3 and Phi-4. Defaults are transformers' Phi3Config's.

longrope changes the rotation of every token when a request grows past the original context, so that
keys in the cache would no longer be what the model wants. So the context ends there.
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
from pelton.errors import UnsupportedError


def read_phi3(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("hidden_act", "silu")
    refuse_foreign(config)
    refuse_experts(config)
    refuse_softcaps(config)
    config.require("layer_types")
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    sizes = dimensions(config)
    rotation = rope(config, sizes["head_dim"], sizes["max_position"], allow_partial=True)
    if rotation.kind == "yarn":
        # The oracle takes it for an old name of longrope.
        raise UnsupportedError(
            f'{config.where}: rope_type="yarn" is not supported in Phi-3; it must be "longrope".'
        )
    has_window = config.get("sliding_window") is not None
    return ModelConfig(
        architecture="Phi3ForCausalLM",
        **sizes,
        hidden_act=config.text("hidden_act"),
        rope=rotation,
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        attention_bias=False,
        mlp_bias=False,
        layer_kinds=("window",) * sizes["num_layers"] if has_window else (),
        window=config.integer("sliding_window") if has_window else None,
        checkpoint_dtype=dtype,
    )
