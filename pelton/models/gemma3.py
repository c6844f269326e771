"""Gemma 3, text: Gemma 2 with query and key norms for softcaps, and two rotations.

Paper: arXiv 2503.19786.
"""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.gemma_names import GEMMA_GGUF, GEMMA_HF


class Gemma3(Decoder):
    names: ClassVar = {"safetensors": GEMMA_HF, "dummy": GEMMA_HF, "gguf": GEMMA_GGUF}
