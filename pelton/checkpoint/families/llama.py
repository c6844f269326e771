"""LlamaForCausalLM: Llama 1 to 3, SmolLM2. Defaults are transformers' LlamaConfig's."""

from __future__ import annotations

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import swiglu_decoder
from pelton.config.model import ModelConfig


def read_llama(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("sliding_window")
    config.require("use_sliding_window", False)
    config.require("layer_types")
    return swiglu_decoder(config, dtype, "LlamaForCausalLM", may_have_biases=True)
