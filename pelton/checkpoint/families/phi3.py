"""Phi3ForCausalLM: Phi-3 and Phi-4. Defaults are transformers' Phi3Config's.

longrope changes the rotation of every token when a request grows past the original context, so that
keys in the cache would no longer be what the model wants. So the context ends there.
"""

from __future__ import annotations

from pelton.checkpoint.config_reader import ConfigReader
from pelton.checkpoint.families.decoder import swiglu_decoder, window_of, with_window
from pelton.config.model import ModelConfig
from pelton.errors import UnsupportedError


def read_phi3(config: ConfigReader, dtype: str) -> ModelConfig:
    config.require("layer_types")
    model = swiglu_decoder(config, dtype, "Phi3ForCausalLM", allow_partial_rope=True)
    if model.rope.kind == "yarn":
        # The oracle takes it for an old name of longrope.
        raise UnsupportedError(
            f'{config.where}: rope_type="yarn" is not supported in Phi-3; it must be "longrope".'
        )
    return with_window(model, window_of(config, None))
