"""Qwen 2 and 2.5: Llama with biases of queries, keys and values. Paper: arXiv 2407.10671."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.llama_names import GGUF_IN_ORDER, LLAMA_HF


class Qwen2(Decoder):
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF, "gguf": GGUF_IN_ORDER}
