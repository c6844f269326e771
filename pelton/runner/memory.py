"""KV pools."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pelton.attention.backend import AttentionBackend
from pelton.core.kv.groups import pool_of_layers
from pelton.core.kv.spec import LayerKV
from pelton.device.protocol import Device


def allocate_kv(
    device: Device,
    backend: AttentionBackend,
    layers: Sequence[LayerKV],
    num_blocks: int,
    held: range | None = None,
) -> tuple[torch.Tensor, ...]:
    """Each layer's pool, in the backend's layout; core/kv/groups.py says which layers have one in
    common. An empty tensor stands in the place of a recurrent layer's, and of those that are not
    among the `held` ones (None: all) of this pipeline stage."""
    mine = [layer for layer in layers if held is None or layer.index in held]
    hosts = pool_of_layers(mine)
    pools = {
        layer.index: backend.allocate(device, layer, num_blocks)
        for layer in mine
        if hosts.get(layer.index) == layer.index
    }
    none = device.empty((0,), torch.uint8)
    return tuple(pools[hosts[layer.index]] if layer.index in hosts else none for layer in layers)
