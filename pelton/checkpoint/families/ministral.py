"""MinistralForCausalLM. Defaults are transformers' MinistralConfig's.

As for Mistral, an absent sliding_window means 4096 and null means none.
"""

from __future__ import annotations

from dataclasses import replace

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import (
    layer_kinds,
    swiglu_decoder,
    window_of,
    with_window,
)
from pelton.config.model import ModelConfig

_WINDOW = 4096


def read_ministral(config: ConfigReader, dtype: str) -> ModelConfig:
    model = swiglu_decoder(config, dtype, "MinistralForCausalLM")
    window = window_of(config, _WINDOW)
    default = with_window(model, window).layer_kinds
    kinds = layer_kinds(config, model.num_layers, default)
    if kinds and window is None:
        raise config.wrong("layer_types", "all full_attention, as sliding_window is null")
    return replace(model, layer_kinds=kinds, window=window if kinds else None)
