"""ModernBERT. Paper: arXiv 2412.13663."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.encoder import Encoder
from pelton.models.modernbert_names import MODERNBERT


class ModernBert(Encoder):
    names: ClassVar = {"safetensors": MODERNBERT, "dummy": MODERNBERT}
