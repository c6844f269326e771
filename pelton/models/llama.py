"""Llama 1 to 3 and what is built like it (SmolLM2). Paper: arXiv 2302.13971."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.llama_names import LLAMA_GGUF, LLAMA_HF


class Llama(Decoder):
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF, "gguf": LLAMA_GGUF}
