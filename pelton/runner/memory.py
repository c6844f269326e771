"""KV pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pelton.attention.backend import AttentionBackend
from pelton.core.kv.spec import LayerKV
from pelton.device.protocol import Device


def allocate_kv(
    device: Device, backend: AttentionBackend, layers: Sequence[LayerKV], num_blocks: int
) -> tuple[torch.Tensor, ...]:
    """One pool per layer, in the backend's layout; a layer that shares another's gets the same."""
    pools: dict[int, torch.Tensor] = {}
    for layer in layers:
        if layer.shares is None:
            pools[layer.index] = backend.allocate(device, layer, num_blocks)
    return tuple(pools[layer.index if layer.shares is None else layer.shares] for layer in layers)
