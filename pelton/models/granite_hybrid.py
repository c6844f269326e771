"""Granite 4, hybrid: Granite whose layers are mostly Mamba 2. Paper of these: arXiv 2405.21060."""

from __future__ import annotations

from typing import ClassVar

from pelton.models.granite import Granite
from pelton.models.granite_hybrid_names import GRANITE_HYBRID_HF


class GraniteHybrid(Granite):
    names: ClassVar = {"safetensors": GRANITE_HYBRID_HF, "dummy": GRANITE_HYBRID_HF}
