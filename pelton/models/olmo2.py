"""OLMo 2: Llama whose norms stand behind attention and feed-forward network, with norms over all
query heads and over all key heads. Paper: arXiv 2501.00656.
"""

from __future__ import annotations

from typing import ClassVar

from pelton.models.decoder import Decoder
from pelton.models.olmo2_names import OLMO2_GGUF, OLMO2_HF


class Olmo2(Decoder):
    names: ClassVar = {"safetensors": OLMO2_HF, "dummy": OLMO2_HF, "gguf": OLMO2_GGUF}
