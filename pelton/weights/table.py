"""Formats that weights are read from: Checkpoint.load_format -> a WeightSource. No torch here."""

from __future__ import annotations

FORMATS: dict[str, str] = {
    "safetensors": "pelton.weights.safetensors:SafetensorsSource",
    "gguf": "pelton.weights.gguf:GGUFSource",
    "dummy": "pelton.weights.dummy:DummySource",
}
