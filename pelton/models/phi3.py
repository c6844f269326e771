"""Phi-3 and Phi-4: Llama with fused weights and partial rotation. Paper: arXiv 2404.14219."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.phi3_names import PHI3_GGUF, PHI3_HF


class Phi3(Decoder):
    names: ClassVar = {"safetensors": PHI3_HF, "dummy": PHI3_HF, "gguf": PHI3_GGUF}
