"""Granite 1 to 4, dense: Llama with factors on embeddings, scores, residuals and logits.

Source of the factors: maximal update parametrisation, arXiv 2203.03466.
"""

from __future__ import annotations

from typing import ClassVar

from pelton.config.model import ModelConfig
from pelton.layers.context import BuildContext
from pelton.models.decoder import Decoder
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF


class Granite(Decoder):
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF, "gguf": LLAMA_GGUF}

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        super().__init__(build, config)
        # Not rounded to the weights' type, as Gemma's is.
        self._embedding_multiplier = config.embedding_multiplier
