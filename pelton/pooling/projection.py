"""Products between pooled features and embeddings, as sentence-transformers' Dense has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from pelton.config.pooling import Projection
from pelton.device.protocol import Device
from pelton.ops import linear
from pelton.ops.product import ProductSignature
from pelton.ops.registry import bind
from pelton.weights.safetensors import SafetensorsSource


class Projected:
    """features [N, in_features] float32 -> [N, out_features] float32."""

    def __init__(self, device: Device, config: Projection, *, batch_invariant: bool) -> None:
        self._config = config
        source = SafetensorsSource([Path(config.file)])
        names = {"weight": "linear.weight", **({"bias": "linear.bias"} if config.has_bias else {})}
        weights = {
            part: source.read(name, 0, 0, config.out_features).float().to(device.torch_device)
            for part, name in names.items()
        }
        signature = ProductSignature(
            in_features=config.in_features,
            out_features=config.out_features,
            dtype=torch.float32,
            device_type=device.torch_device.type,
            has_bias=config.has_bias,
            batch_invariant=batch_invariant,
        )
        self._product = bind("linear", linear.CANDIDATES, signature, **weights)

    def run(self, features: torch.Tensor) -> torch.Tensor:
        out = features.new_empty(len(features), self._config.out_features)
        self._product(len(features), features, out)
        return out.tanh_() if self._config.activation == "tanh" else out


def load_projections(
    device: Device, configs: Sequence[Projection], *, batch_invariant: bool
) -> list[Projected]:
    return [Projected(device, config, batch_invariant=batch_invariant) for config in configs]
