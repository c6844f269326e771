"""Which layers share a block table."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.core.kv.spec import KVGroup, LayerKV
from pelton.errors import UnsupportedError


def group_layers(layers: Sequence[LayerKV]) -> tuple[KVGroup, ...]:
    """One group per distinct (kind, window, block size), in order of first use.

    Layers that share another's KV join that layer's group. Raises UnsupportedError for a kind that
    no block table serves yet.
    """
    keys: dict[tuple[str, int | None, int], list[int]] = {}
    for layer in layers:
        if layer.kind != "full":
            raise UnsupportedError(
                f"KV kind {layer.kind!r} (layer {layer.index}) is not supported."
            )
        keys.setdefault((layer.kind, layer.window, layer.block_size), []).append(layer.index)
    return tuple(
        KVGroup(index=i, layers=tuple(members), block_size=key[2], kind="full", window=key[1])
        for i, (key, members) in enumerate(keys.items())
    )


def block_bytes(layers: Sequence[LayerKV]) -> int:
    """Bytes of one block over all layers that own KV."""
    return sum(layer.page_bytes for layer in layers if layer.shares is None)
