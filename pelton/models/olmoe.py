"""OLMoE: Llama with experts in every layer, and norms over all query heads and over all key heads.

Paper: arXiv 2409.02060.
"""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.qwen3_moe_names import QWEN3_MOE_GGUF, QWEN3_MOE_HF


class Olmoe(Decoder):
    names: ClassVar = {
        "safetensors": QWEN3_MOE_HF,
        "dummy": QWEN3_MOE_HF,
        "gguf": QWEN3_MOE_GGUF,
    }
