"""GPT-OSS: sparse layers with a clamped activation, attention sinks, every second layer windowed.
Model card: arXiv 2508.10925."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.gpt_oss_names import GPT_OSS_GGUF, GPT_OSS_HF


class GptOss(Decoder):
    names: ClassVar = {"safetensors": GPT_OSS_HF, "dummy": GPT_OSS_HF, "gguf": GPT_OSS_GGUF}
