"""Mistral: Llama with a sliding window over all layers. Paper: arXiv 2310.06825."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF


class Mistral(Decoder):
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF, "gguf": LLAMA_GGUF}
