"""Gemma 2: local and global layers, norms on both sides, softcaps. Paper: arXiv 2408.00118."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.gemma_names import GEMMA_GGUF, GEMMA_HF


class Gemma2(Decoder):
    names: ClassVar = {"safetensors": GEMMA_HF, "dummy": GEMMA_HF, "gguf": GEMMA_GGUF}
