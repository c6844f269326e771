"""Ministral: Mistral with a sliding window over some layers. Report: mistral.ai/news/ministraux."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.llama_names import LLAMA_HF


class Ministral(Decoder):
    names: ClassVar = {"safetensors": LLAMA_HF, "dummy": LLAMA_HF}
