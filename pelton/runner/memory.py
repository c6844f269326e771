"""KV pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pelton.attention.backend import AttentionBackend
from pelton.core.kv.groups import pool_of_layers
from pelton.core.kv.spec import LayerKV
from pelton.device.protocol import Device


def allocate_kv(
    device: Device, backend: AttentionBackend, layers: Sequence[LayerKV], num_blocks: int
) -> tuple[torch.Tensor, ...]:
    """Each layer's pool, in the backend's layout; core/kv/groups.py says which layers have one in
    common. A recurrent layer has none: an empty tensor stands in its place."""
    hosts = pool_of_layers(layers)
    pools = {
        layer.index: backend.allocate(device, layer, num_blocks)
        for layer in layers
        if hosts.get(layer.index) == layer.index
    }
    none = device.empty((0,), torch.uint8)
    return tuple(
        none if layer.kind == "recurrent" else pools[hosts[layer.index]] for layer in layers
    )
