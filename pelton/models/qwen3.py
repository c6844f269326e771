"""Qwen 3, dense: Llama with a norm over each query and key head. Paper: arXiv 2505.09388."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.qwen3_names import QWEN3_GGUF, QWEN3_HF


class Qwen3(Decoder):
    names: ClassVar = {"safetensors": QWEN3_HF, "dummy": QWEN3_HF, "gguf": QWEN3_GGUF}
