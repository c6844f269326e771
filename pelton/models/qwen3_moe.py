"""Qwen 3, mixture of experts: Qwen 3 with sparse layers. Paper: arXiv 2505.09388."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.qwen3_moe_names import QWEN3_MOE_GGUF, QWEN3_MOE_HF


class Qwen3Moe(Decoder):
    names: ClassVar = {
        "safetensors": QWEN3_MOE_HF,
        "dummy": QWEN3_MOE_HF,
        "gguf": QWEN3_MOE_GGUF,
    }
