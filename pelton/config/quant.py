"""How weights are kept that the checkpoint holds quantised."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantConfig:
    """scheme: a name of quant/table.py. num_elements and num_bytes: of what stays quantised."""

    scheme: str = "dequantise"
    num_elements: int = 0
    num_bytes: int = 0
