"""Granite 1 to 4, dense: Llama with factors on embeddings, scores, residuals and logits.

Source of the factors: maximal update parametrisation, arXiv 2203.03466.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from pelton.batch.prompt_embeds import LayOver, nothing_over
from pelton.config.model import ModelConfig
from pelton.layers.context import BuildContext, Communicator
from pelton.models.decoder import Decoder
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF


class Granite(Decoder):
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF, "gguf": LLAMA_GGUF}

    def __init__(self, build: BuildContext, config: ModelConfig) -> None:
        super().__init__(build, config)
        # Not rounded to the weights' type, as Gemma's is.
        self._embedding_multiplier = config.embedding_multiplier

    def embed(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        communicator: Communicator,
        lay_over: LayOver = nothing_over,
    ) -> None:
        """The factor is on embeddings that are given, too."""
        self.embedding.run(ids, out, communicator)
        lay_over(out)
        out.mul_(self._embedding_multiplier)
