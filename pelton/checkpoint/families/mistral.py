"""MistralForCausalLM. Defaults are transformers' MistralConfig's.

An absent sliding_window means 4096 there and null means none; both are read so.
"""

from __future__ import annotations

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import swiglu_decoder, window_of, with_window
from pelton.config.model import ModelConfig

_WINDOW = 4096


def read_mistral(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("layer_types")
    model = swiglu_decoder(config, dtype, "MistralForCausalLM")
    return with_window(model, window_of(config, _WINDOW))
