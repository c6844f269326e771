"""Which layers share a block table, and which share memory.

A block id belongs to one group at a time, and indexes the pool of every layer. So layers of
different groups may lie in the same pool: the first of each group in one, the second of each in
another, and a block costs what one group needs of it. For that the groups must be of one size:

    full   f0         f1             block table 0 |      pool 0: f0 w0 w2
    window w0 w1 w2 w3               w0 w1: table 1 |     pool 1: f1 w1 w3
                                     w2 w3: table 2 |

The same idea as in vLLM's hybrid KV cache manager. Not so for recurrent layers: there a state is a
page, so that every attention block grows to hundreds of tokens to be as large. Here a row's state
lives outside the pool, and only copies of it for later prefix hits, its checkpoints, lie in
ordinary blocks, as many as it takes (`state_places`). So KV blocks stay small, and there is one
memory for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pelton.core.kv.spec import KVGroup, LayerKV
from pelton.errors import ConfigError, UnsupportedError

_Layout = tuple[int, int, int, str, str | None, int]


@dataclass(frozen=True, slots=True)
class StatePlace:
    """Where a recurrent layer's state lies in a checkpoint: pages first..first + count of the
    checkpoint's blocks, in the pool of layer `host`."""

    layer: int
    host: int
    first: int
    count: int


def group_layers(layers: Sequence[LayerKV], checkpoint_interval: int = 0) -> tuple[KVGroup, ...]:
    """Groups of layers alike in (kind, window, block size), in order of first use; then the
    recurrent layers, if their state is to be kept every checkpoint_interval tokens (0: never).

    Where all layers have one layout and more than one kind, kinds with more layers than the least
    are split, so that groups are no larger than the smallest kind. Layers that share another's KV
    join that layer's group. Raises UnsupportedError for a kind that is not served yet and for
    recurrent layers without others, ConfigError for a window that is not at least 1.
    """
    all_layers = layers
    recurrent = tuple(layer.index for layer in layers if layer.kind == "recurrent")
    layers = [layer for layer in layers if layer.kind != "recurrent"]
    if recurrent and not layers:
        raise UnsupportedError(
            "A model of recurrent layers alone is not supported: what is kept of their state for "
            "prefix hits lies in the KV blocks of attention layers."
        )
    kinds: dict[tuple[str, int | None, int], list[int]] = {}
    for layer in layers:
        if layer.kind not in ("full", "window"):
            raise UnsupportedError(
                f"KV kind {layer.kind!r} (layer {layer.index}) is not supported."
            )
        is_window = layer.kind == "window"
        if (layer.window is not None and layer.window >= 1) != is_window:
            raise ConfigError(
                f"window of a layer of KV kind {layer.kind!r} must be "
                f"{'at least 1' if is_window else 'None'}, got {layer.window} "
                f"(layer {layer.index})."
            )
        if layer.shares is None:
            key = (layer.kind, layer.window, layer.block_size)
            kinds.setdefault(key, []).append(layer.index)
    largest = max(map(len, kinds.values()), default=1)
    if len({_layout(layer) for layer in layers}) == 1:
        largest = min(map(len, kinds.values()))
    members = [
        (key, own[first : first + largest])
        for key, own in kinds.items()
        for first in range(0, len(own), largest)
    ]
    sharers: dict[int, list[int]] = {}
    for layer in layers:
        if layer.shares is not None:
            sharers.setdefault(layer.shares, []).append(layer.index)
    groups = [
        KVGroup(
            index=i,
            layers=tuple(
                sorted(own + [other for layer in own for other in sharers.get(layer, ())])
            ),
            block_size=block_size,
            kind="full" if window is None else "window",
            window=window,
        )
        for i, ((_, window, block_size), own) in enumerate(members)
    ]
    if recurrent and checkpoint_interval:
        groups.append(
            KVGroup(
                index=len(groups),
                layers=recurrent,
                block_size=checkpoint_interval,
                kind="recurrent",
                pages=max(place.first + place.count for place in state_places(all_layers)),
            )
        )
    return tuple(groups)


def with_tables(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """The groups that have a block table; they come first, so that each stands at its own index."""
    return tuple(group for group in groups if group.has_table)


def state_places(layers: Sequence[LayerKV]) -> tuple[StatePlace, ...]:
    """Where each recurrent layer's state lies in a checkpoint, in the order of `layers`.

    Each begins a new page, in the pool where it ends at the lowest one.
    """
    by_index = {layer.index: layer for layer in layers}
    filled = dict.fromkeys(sorted(set(pool_of_layers(layers).values())), 0)
    places = []
    for layer in layers:
        if layer.kind == "recurrent":
            assert layer.state_bytes > 0, f"layer {layer.index} has no state"
            counts = {pool: -(-layer.state_bytes // by_index[pool].page_bytes) for pool in filled}
            host = min(filled, key=lambda pool: filled[pool] + counts[pool])
            places.append(StatePlace(layer.index, host, filled[host], counts[host]))
            filled[host] += counts[host]
    return tuple(places)


def pool_of_layers(layers: Sequence[LayerKV]) -> dict[int, int]:
    """Layer index -> index of the layer in whose pool its KV lies; a recurrent layer has none.

    A layer that shares another's KV lies where that one does. Otherwise the n-th layer of a layout
    in each group lies with the n-th of that layout in every other.
    """
    by_index = {layer.index: layer for layer in layers}
    hosts: dict[tuple[_Layout, int], int] = {}
    pools: dict[int, int] = {}
    for group in group_layers(layers):
        counts: dict[_Layout, int] = {}
        for index in group.layers:
            layout = _layout(by_index[index])
            if by_index[index].shares is None:
                number = counts.get(layout, 0)
                counts[layout] = number + 1
                pools[index] = hosts.setdefault((layout, number), index)
    for layer in layers:
        if layer.shares is not None:
            pools[layer.index] = pools[layer.shares]
    return pools


def block_bytes(layers: Sequence[LayerKV]) -> int:
    """Bytes of one block over all pools."""
    by_index = {layer.index: layer for layer in layers}
    return sum(by_index[host].page_bytes for host in set(pool_of_layers(layers).values()))


def smallest_reusable_prefix(groups: Sequence[KVGroup]) -> int:
    """Tokens. A prefix hit is a multiple of this: it must end where blocks of all groups end, and
    where a checkpoint may be."""
    return math.lcm(*(group.block_size for group in groups))


def _layout(layer: LayerKV) -> _Layout:
    """What decides the shape of a layer's pool."""
    return (
        layer.block_size,
        layer.num_kv_heads,
        layer.head_dim,
        layer.dtype,
        layer.scale_dtype,
        layer.page_bytes,
    )
