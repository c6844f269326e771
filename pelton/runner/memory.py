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
    common."""
    hosts = pool_of_layers(layers)
    pools = {
        layer.index: backend.allocate(device, layer, num_blocks)
        for layer in layers
        if hosts[layer.index] == layer.index
    }
    return tuple(pools[hosts[layer.index]] for layer in layers)
