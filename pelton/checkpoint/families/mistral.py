"""MistralForCausalLM. Defaults are transformers' MistralConfig's.

An absent sliding_window means 4096 there and null means none; both are read so.
"""

from __future__ import annotations

from dataclasses import replace

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import swiglu_decoder, window_of
from pelton.config.model import ModelConfig

_WINDOW = 4096


def read_mistral(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("layer_types")
    model = swiglu_decoder(config, dtype, "MistralForCausalLM")
    window = window_of(config, _WINDOW)
    if window is None:
        return model
    return replace(model, layer_kinds=("window",) * model.num_layers, window=window)
